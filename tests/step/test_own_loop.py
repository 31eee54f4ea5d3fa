"""The objective outside the trainer: the loop of the documentation equals Algorithm 1, losses equal the references."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from dicedist import ConditionalRedundancy, DistributedRedundancy, losses
from dicedist.algorithm.randomness import generator
from tests.algorithm1 import Algorithm1
from tests.support import references
from tests.support.literal import literal_of
from tests.support.pages import names_of
from tests.support.steps import CPU, STRONG, B, K, batch_at, build_step, configured

NOW = SimpleNamespace(log_beta=math.log(3.0), ramp_up=1.0)


def as_algorithm_1(member):
    """A member of the documentation with the names that Algorithm 1 uses."""
    own = copy.deepcopy(member)
    own.bottleneck = SimpleNamespace(scale=own.scale, prior_KD=own.priors)
    return own


@pytest.mark.usefixtures("double_precision")
def test_the_loop_of_the_documentation_is_algorithm_1():
    torch.manual_seed(0)
    loop = names_of("own-loop.md")
    w = loop.redundancy.discriminator
    reference = Algorithm1([as_algorithm_1(member) for member in loop.members], literal_of(w.network), K, w.delta)
    for n in range(4):
        batch = batch_at(n, size=8)
        draws = generator(CPU, 0, "redundancy", 0, n), [generator(CPU, 0, "discriminator", 0, n, k) for k in range(4)]
        torch.manual_seed(n)
        found = loop.step(batch.images[0], batch.labels_B, beta=2.0, ramp_up=0.5, covariance=0.7)
        torch.manual_seed(n)
        own, redundancy, w_loss, gradients = reference.step(
            batch.images[0], batch.labels_B, 2.0, 0.1, 0.5, 0.7, [torch.default_generator] * loop.M, *draws
        )
        assert found == pytest.approx(sum(own) + 0.2 * 0.5 / (loop.M - 1) * 3 * redundancy, rel=1e-9), n
        values = {name: float(value) for name, value in loop.redundancy.values.items()}
        assert values["redundancy"] == pytest.approx(redundancy, rel=1e-6), n
        assert values["redundancy_nats"] == pytest.approx(redundancy + math.log(4), rel=1e-6), n
        assert values["discriminator/loss"] == pytest.approx(w_loss, rel=1e-6), n
        for member, expected in zip(loop.members, gradients, strict=True):
            for name, parameter in member.named_parameters():
                torch.testing.assert_close(parameter.grad, expected[name], atol=1e-9, rtol=1e-6)


def test_it_is_the_discriminator_of_the_trainer():
    """Bit for bit: the same seed gives the same weights, gradients, and weights after learning."""
    config = configured(3, *STRONG)
    step = build_step(config)
    features, batch, own = random_features(3, 64), batch_at(5), config.redundancy
    settings = {name: getattr(own, name) for name in ("num_samples", "num_steps", "negatives", "memory", "lr")}
    plain = ConditionalRedundancy(3, 64, K, own.delta, seed=config.seed, **settings)
    where = (batch.epoch, batch.step_in_epoch)
    for _ in range(2):
        now = SimpleNamespace(ramp_up=0.3, covariance=0.6)
        read = SimpleNamespace(means_MBD=features[0], scales_MBD=features[1])
        expected, _ = step.hosted.w.redundancy_gradients(read, batch.labels_B, now, where)
        means = features[0].clone().requires_grad_()
        (2 * plain(means, features[1], batch.labels_B, 0.3, 0.6, where)).backward()
        assert means.grad.equal(2 * expected)
        step.hosted.w.learn(step.hosted.discriminator.optimizer, read, batch.labels_B, now, where)
        plain.learn()
        for name, value in step.hosted.w.state_dict().items():
            assert plain.discriminator.state_dict()[name].equal(value), name


def random_features(members, width, seed=0):
    draws = generator(CPU, seed, "features")
    return torch.randn(members, B, width, generator=draws), torch.rand(members, B, width, generator=draws) + 0.5


def test_a_loop_that_was_stopped_continues_as_if_it_had_not_been():
    labels = batch_at(0).labels_B
    whole, first = (ConditionalRedundancy(2, 8, K, 0.1, negatives=2) for _ in range(2))
    for n in range(4):
        expected = whole(*random_features(2, 8, n), labels)
        whole.learn()
        if n == 2:
            saved, first = first.state_dict(), ConditionalRedundancy(2, 8, K, 0.1, negatives=2, seed=0)
            first.load_state_dict(saved)
        found = first(*random_features(2, 8, n), labels)
        first.learn()
        assert found.equal(expected)
    for name, value in whole.discriminator.state_dict().items():
        assert first.discriminator.state_dict()[name].equal(value), name


def test_members_may_come_as_a_list_and_without_scales():
    labels, (means, scales) = batch_at(0).labels_B, random_features(2, 8)
    one, other = (ConditionalRedundancy(2, 8, K, 0.1, scale="one") for _ in range(2))
    assert one(list(means), list(scales), labels).equal(other(means, None, labels))
    low = one.independence(means, labels)
    assert low.shape == (B,) and ((0 < low) & (low < 1)).all()


def called(redundancy, means, scales, labels):
    """Call either object; the distributed one takes members by number."""
    if isinstance(redundancy, DistributedRedundancy):
        return redundancy(dict(enumerate(means)), dict(enumerate(scales)), labels)
    return redundancy(means, scales, labels)


both = pytest.mark.parametrize("build", [ConditionalRedundancy, DistributedRedundancy])


@both
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(build, half):
    """The discriminator computes in float32: in half precision its gradients are wrong after one step."""
    labels, (means, scales) = batch_at(0).labels_B, random_features(2, 8)
    found = []
    for enabled in (False, True):
        redundancy, own = build(2, 8, K, 0.1), means.clone().requires_grad_()
        with torch.autocast("cpu", half, enabled=enabled):
            for _ in range(2):
                called(redundancy, own, scales, labels).backward()
                redundancy.learn()
            plain = redundancy if build is ConditionalRedundancy else redundancy.own
            found.append([own.grad, plain.independence(means.to(half), labels), *redundancy.parameters()])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_a_discriminator_in_half_precision_is_refused():
    redundancy = ConditionalRedundancy(2, 8, K).half()
    with pytest.raises(ValueError, match="discriminator is torch.float16: keep it in float32, and use autocast"):
        redundancy(*random_features(2, 8), batch_at(0).labels_B)


@both
@pytest.mark.parametrize("reading", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_only_reads(build, reading):
    """The value is that of training, and training goes on as if nothing had been read."""
    labels, (means, scales) = batch_at(0).labels_B, random_features(2, 8)
    found = []
    for reads in (False, True):
        redundancy, own = build(2, 8, K, negatives=2, terms="both"), means.clone().requires_grad_()
        for _ in range(2):
            loss = called(redundancy, own, scales, labels)
            if reads:
                with reading():
                    assert called(redundancy, own, scales, labels).equal(loss)
                    called(redundancy, own[:, :5], scales[:, :5], labels[:5])
            loss.backward()
            redundancy.learn()
        found.append([own.grad, *redundancy.parameters()])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_reading_comes_first_in_some_loops():
    """Lightning checks validation before it trains, in inference mode, whose tensors autograd refuses."""
    labels, (means, scales) = batch_at(0).labels_B, random_features(2, 8)
    redundancy = ConditionalRedundancy(2, 8, K)
    with torch.inference_mode():
        redundancy(means, scales, labels)
    with pytest.raises(ValueError, match="there is no batch to learn from"):
        redundancy.learn()
    redundancy(means.requires_grad_(), scales, labels).backward()
    assert redundancy.learn()["redundancy"].isfinite()


def test_the_last_of_several_batches_is_learned():
    labels, features = batch_at(0).labels_B, random_features(2, 8)
    once, twice = (ConditionalRedundancy(2, 8, K) for _ in range(2))
    twice(*random_features(2, 8, seed=1), labels)
    for redundancy in (once, twice):
        redundancy(*features, labels)
        redundancy.learn()
    assert all(one.equal(other) for one, other in zip(once.parameters(), twice.parameters(), strict=True))


def test_an_optimizer_of_all_parameters_leaves_the_discriminator_alone():
    """Loops that accumulate gradients clear none between two batches."""
    labels, (means, scales) = batch_at(0).labels_B, random_features(2, 8)
    redundancy, own = ConditionalRedundancy(2, 8, K), torch.nn.Parameter(means)
    optimizer = torch.optim.AdamW([own, *redundancy.parameters()], 0.1)
    redundancy(own, scales, labels).backward()
    redundancy.learn()
    before = [parameter.clone() for parameter in redundancy.parameters()]
    optimizer.step()
    assert all(one.equal(other) for one, other in zip(before, redundancy.parameters(), strict=True))


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda m, s, y: ConditionalRedundancy(1, 8, K, 0.1), "num_members=1: write a whole number from 2"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, 0.1, tau=0), "tau=0: write a number above 0"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, 0.1, terms="left"), "terms=left: write one of lhs, rhs, both"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, 0.1, scale="two"), "scale=two: write one of"),
        (lambda m, s, y: ConditionalRedundancy(2, 9, K, 0.1)(m, s, y), r"means have shape \[2, 24, 8\]: give \[2, in"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, 0.1)(m, s[:, :3], y), r"scales have shape \[2, 3, 8\], and me"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, 0.1)(m, s, y.float()), r"labels are torch.float32 \[24\]"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, 3, 0.1)(m, s, y), r"labels lie in 0..9, but there are 3 classes"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, 0.1)(m, s, y.tolist()), r"labels are a list: give a tensor"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, 0.1)(m.long(), s, y), "means are torch.int64: give floats"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, math.nan), "delta=nan: write a number"),
        (lambda m, s, y: ConditionalRedundancy(2.5, 8, K, 0.1), "num_members=2.5: write a whole number from 2"),
        (lambda m, s, y: losses.cross_entropy(m, y.float()), r"labels are torch.float32 \[24\]: give torch.int64"),
        (lambda m, s, y: losses.cross_entropy(m[..., :3], y), "labels lie in 0..9, but there are 3 classes"),
        (lambda m, s, y: losses.vceb(m, y % 8, m, s, m[:, :8, :4], 1.0), r"priors have shape .*: give \[2, 8, 8\]"),
        (lambda m, s, y: losses.vceb(m, y % 8, m, s[:1], m[:, :8], 1.0), r"scales have shape \[1, 24, 8\], and means"),
        (lambda m, s, y: losses.vib(m, y % 8, m, s, m[:, :1], 0.0), "beta=0.0: write a number above 0"),
        (lambda m, s, y: losses.dml(m[:1]), "with at least 2 members"),
        (lambda m, s, y: losses.cl_ilr(m, 0), "temperature=0: write a number above 0"),
        (lambda m, s, y: ConditionalRedundancy(2, 8, K, 0.1).learn(), "there is no batch to learn from"),
        (lambda m, s, y: losses.cross_entropy(m[0], y), r"logits have shape \[24, 8\]: give \[members, 24, classes\]"),
    ],
)
def test_refusals(build, line):
    with pytest.raises(ValueError, match=line):
        build(*random_features(2, 8), batch_at(0).labels_B)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", ["vceb", "vib", "adp", "dml", "cl_ilr", "one", "okddip"])
def test_losses_and_their_gradients_equal_the_references(name):
    """The references are plain lines, one input at a time if that is the definition."""
    draws = generator(CPU, 0, "losses")
    M, D = 3, 5
    logits, means = (torch.randn(M, B, n, generator=draws).requires_grad_() for n in (K, D))
    scales = (torch.rand(M, B, D, generator=draws) + 0.5).requires_grad_()
    labels = batch_at(0).labels_B
    told = [SimpleNamespace(logits=z, mean=m, scale=s) for z, m, s in zip(logits, means, scales, strict=True)]
    priors = torch.randn(M, K if name == "vceb" else 1, D, generator=draws)
    bottlenecks = [SimpleNamespace(bottleneck=SimpleNamespace(prior_KD=prior)) for prior in priors]
    ensemble = SimpleNamespace(members=bottlenecks)
    if name in ("vceb", "vib"):
        beta = 3.0 if name == "vceb" else 4.0
        found = getattr(losses, name)(logits, labels, means, scales, priors, beta)
        parts = getattr(references, name)(ensemble, told, labels, NOW)
    elif name == "adp":
        found = losses.adp(logits, labels, alpha=2.0, beta=0.5)
        parts = references.adp(None, told, labels, NOW, alpha=2.0, beta=0.5)
    elif name == "dml":
        found, parts = losses.dml(logits), references.dml(None, told, labels, NOW)
    elif name == "cl_ilr":
        found, parts = losses.cl_ilr(logits, 3.0), references.cl_ilr(None, told, labels, NOW, 3.0)
    elif name == "one":
        gate = SimpleNamespace(linear=torch.nn.Linear(D, M), norm=torch.nn.BatchNorm1d(M))
        for t in told:
            t.pooled = t.mean
        opened = torch.stack([t.mean @ gate.linear.weight[i] + gate.linear.bias[i] for i, t in enumerate(told)], 1)
        gates = torch.relu((opened - opened.mean(0)) / torch.sqrt(opened.var(0, unbiased=False) + 1e-5))
        found = losses.one(logits, labels, gates.T[..., None], 3.0)
        parts = references.one(SimpleNamespace(shared={"gate": gate}, trunk=None), told, labels, NOW, 3.0)
    else:
        shared = {which: torch.nn.Linear(D, 2, bias=False) for which in ("query", "key")}
        queries, keys = (torch.stack([shared[which](m) for m in means[:-1]]) for which in ("query", "key"))
        found = losses.okddip(logits, queries, keys, 3.0)
        parts = references.okddip(SimpleNamespace(shared=shared), told, labels, NOW, 3.0)
    expected = sum(sum(part) if isinstance(part, list) else part for part in parts.values())
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    of_found, of_expected = (
        torch.autograd.grad(x, [logits, means, scales], allow_unused=True) for x in (found, expected)
    )
    for one, other in zip(of_found, of_expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-7)
