"""Distances from the features of training images: scores for out-of-distribution detection, higher for ID.

Shapes: M members, N inputs (B at a time), R training inputs, D features, K classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEIGHBOURS = 50  # as in Sun et al. (2022) for CIFAR
BATCH = 500


@dataclass(frozen=True)
class Reference:
    """The training features that scores compare with, in float32 for speed except for the covariances."""

    directions_RD: Tensor  # all members side by side, each of length 1
    means_MKD: Tensor
    whitening_MDD: Tensor  # turns the distance within a class into a Euclidean one

    @classmethod
    def of(cls, features_MRD: Tensor, labels_R: Tensor, num_classes: int) -> "Reference":
        features = features_MRD.double()
        sums_MKD = torch.zeros(len(features), num_classes, features.shape[2], dtype=torch.float64)
        sums_MKD = sums_MKD.index_add(1, labels_R, features)
        counts_K = labels_R.bincount(minlength=num_classes)
        means_MKD = sums_MKD / counts_K.clamp_min(1)[:, None]
        means_MKD[:, counts_K == 0] = torch.inf  # a class without images is near to nothing
        centred_MRD = features - means_MKD[:, labels_R]
        covariance_MDD = centred_MRD.mT @ centred_MRD / len(labels_R)
        return cls(side_by_side(features_MRD), means_MKD, whitening(covariance_MDD))

    def knn(self, features_MND: Tensor) -> Tensor:
        """Minus the distance to the 50th nearest training image: the members' directions, all together."""
        directions_ND = side_by_side(features_MND)
        nth = min(NEIGHBOURS, len(self.directions_RD))
        likeness_N = torch.cat(
            [
                (chunk_BD @ self.directions_RD.T).topk(nth, dim=1).values[:, -1]
                for chunk_BD in directions_ND.split(BATCH)
            ]
        )
        # Members have length 1 each, so that the squared distance is 2 M - 2 times the product.
        return -(2 * len(features_MND) - 2 * likeness_N.double()).clamp_min(0).sqrt()

    def mahalanobis(self, features_MND: Tensor) -> Tensor:
        """Minus the squared distance to the nearest class mean under the covariance within classes, mean of members."""
        nearest = []
        for features_ND, means_KD, whitening_DD in zip(features_MND, self.means_MKD, self.whitening_MDD, strict=True):
            known_KD = means_KD[means_KD.isfinite().all(1)] @ whitening_DD
            whitened_ND = features_ND.double() @ whitening_DD
            nearest.append(torch.cdist(whitened_ND, known_KD).square().amin(1))
        return -torch.stack(nearest).mean(0)


def side_by_side(features_MND: Tensor) -> Tensor:
    """[N, M * D], the features of each member divided by their length."""
    lengths_MN1 = features_MND.norm(dim=2, keepdim=True).clamp_min(1e-10)
    rows_ND: Tensor = (features_MND / lengths_MN1).float().permute(1, 0, 2).flatten(1).contiguous()
    return rows_ND


def whitening(covariance_MDD: Tensor) -> Tensor:
    """W with W W' the pseudo-inverse: directions in which features do not vary within a class do not count."""
    values_MD, vectors_MDD = torch.linalg.eigh(covariance_MDD)
    kept_MD = values_MD > 1e-10 * values_MD.amax(1, keepdim=True)
    scale_MD = torch.where(kept_MD, values_MD.clamp_min(1e-300).rsqrt(), torch.zeros_like(values_MD))
    scaled_MDD: Tensor = vectors_MDD * scale_MD[:, None, :]
    return scaled_MDD
