"""OOD scores from distances to the features of training images, higher for in-distribution inputs.

Shapes: M members, N inputs, R training inputs, D features, K classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_IN_BANK = 2000  # training inputs
LARGEST_BANK = 2**23  # bytes of features: every export contains the bank
ONE_IN = 200  # k is the bank's size divided by this: Sun et al. (2022) take the 50th neighbor of 10,000
ROUNDING = 1e-5  # error of a cosine of features in half precision


def bank_size(num_members: int, width: int) -> int:
    """Return the number of training inputs in a bank: fewer if features are wide."""
    return max(1, min(MOST_IN_BANK, LARGEST_BANK // (2 * num_members * width)))


def bank_of(features_MRD: Tensor) -> Tensor:
    """Return the directions [R, M, D] of training features in half precision, for `knn`."""
    return directions(features_MRD).permute(1, 0, 2).half().contiguous()


def knn(bank_RMD: Tensor, features_MND: Tensor) -> Tensor:
    """Return the nearness of each input to its k-th nearest training input: 1 for equal directions, 0 for opposite.

    The score is 1 - d/2, where d is the root mean square over members of the distance between directions. k is the
    bank's size divided by 200 (Sun et al., 2022). The function also runs inside an exported graph.
    """
    rows_NX = directions(features_MND).permute(1, 0, 2).flatten(1)
    nth = max(1, round(len(bank_RMD) / ONE_IN))
    cosine_N = (rows_NX @ bank_RMD.flatten(1).to(rows_NX).T).topk(nth, dim=1).values[:, -1] / len(features_MND)
    return 1 - ((1 - cosine_N).clamp_min(ROUNDING) / 2).sqrt()


def directions(features_MND: Tensor) -> Tensor:
    """Divide the features of each member by their length."""
    unit_MND: Tensor = features_MND / features_MND.norm(dim=2, keepdim=True).clamp_min(1e-10)
    return unit_MND


@dataclass(frozen=True)
class Reference:
    """The classes of the training features, for Mahalanobis distances."""

    means_MKD: Tensor
    whitening_MDD: Tensor  # turns the distance within a class into a Euclidean one

    @classmethod
    def of(cls, features_MRD: Tensor, labels_R: Tensor, num_classes: int) -> "Reference":
        features = features_MRD.double()
        sums_MKD = torch.zeros(len(features), num_classes, features.shape[2], dtype=torch.float64)
        sums_MKD = sums_MKD.index_add(1, labels_R, features)
        counts_K = labels_R.bincount(minlength=num_classes)
        means_MKD = sums_MKD / counts_K.clamp_min(1)[:, None]
        means_MKD[:, counts_K == 0] = torch.inf  # so that a class without images is never the nearest
        centered_MRD = features - means_MKD[:, labels_R]
        covariance_MDD = centered_MRD.mT @ centered_MRD / len(labels_R)
        return cls(means_MKD, whitening(covariance_MDD))

    def mahalanobis(self, features_MND: Tensor) -> Tensor:
        """Return minus the squared Mahalanobis distance to the nearest class mean, averaged over members."""
        nearest = []
        for features_ND, means_KD, whitening_DD in zip(features_MND, self.means_MKD, self.whitening_MDD, strict=True):
            known_KD = means_KD[means_KD.isfinite().all(1)] @ whitening_DD
            whitened_ND = features_ND.double() @ whitening_DD
            nearest.append(torch.cdist(whitened_ND, known_KD).square().amin(1))
        return -torch.stack(nearest).mean(0)


def whitening(covariance_MDD: Tensor) -> Tensor:
    """Return W with W W' the pseudo-inverse of the covariance, which ignores directions without variance."""
    values_MD, vectors_MDD = torch.linalg.eigh(covariance_MDD)
    kept_MD = values_MD > 1e-10 * values_MD.amax(1, keepdim=True)
    scale_MD = torch.where(kept_MD, values_MD.clamp_min(1e-300).rsqrt(), torch.zeros_like(values_MD))
    scaled_MDD: Tensor = vectors_MDD * scale_MD[:, None, :]
    return scaled_MDD
