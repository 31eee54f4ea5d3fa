"""Optimizers, clipping, averages and batches in pieces, in the step and in runs that are interrupted."""

import pytest
import torch

from dicedist.evaluation.loading import load_ensemble
from dicedist.evaluation.readings import LOGITS
from dicedist.runs.checkpoint import AVERAGED_WEIGHTS, of_kind, tensors_of
from dicedist.runs.run import Run
from tests.support.steps import STRONG, batch_at, build_step, configured, weights_of
from tests.support.tiny import asked_after, assert_same_run, build, train

PLAIN = ("network._target_=tests.support.networks.Plain", "network.trusted=true")
DRAWS = ("network._target_=tests.support.networks.Normless", "network.trusted=true")
MODERN = (
    "optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.schedule=cosine", "optimizer.warmup_epochs=1",
    "optimizer.decay_norms=false", "optimizer.layer_decay=0.7", "optimizer.backbone_factor=0.5",
    "optimizer.clip_norm=1", "optimizer.ema=0.8", "optimizer.accumulate=2",
)  # fmt: skip


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("method", "structure"), [("dice", "net"), ("one", "branch"), ("cl_ilr", "branch")])
def test_a_batch_in_pieces_equals_the_whole(method, structure):
    """Without batch norm, whatever members send each other, and with a gate that reads the trunk."""
    given = (*PLAIN, *STRONG, f"method={method}", f"structure={structure}")
    whole, pieces = (build_step(configured(2, *given, f"optimizer.accumulate={n}")) for n in (1, 5))
    for n in range(3):
        values, again = whole(batch_at(n)).values, pieces(batch_at(n)).values
        assert {name: float(value) for name, value in again.items()} == pytest.approx(
            {name: float(value) for name, value in values.items()}
        )
    for part, weights in weights_of(whole).items():
        torch.testing.assert_close(weights_of(pieces)[part], weights)


def test_pieces_keep_fewer_activations():
    def kept(pieces):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        step = build_step(configured(2, "method=ind", f"optimizer.accumulate={pieces}"))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step.encoders.encode(batch_at(0))
        return total

    assert kept(4) < 0.2 * kept(1)


def test_batch_norm_in_pieces_follows_every_piece_once():
    """Each piece is normalized by itself, and moves the running statistics once: not again in backward."""
    step = build_step(configured(2, "method=ind", "optimizer.accumulate=3"))
    norm = step.hosted.member(0).encoder.trunk[0][1]
    step.encoders.encode(batch_at(0))
    forward = {name: value.clone() for name, value in norm.named_buffers()}
    assert int(forward["num_batches_tracked"]) == 3
    again = build_step(configured(2, "method=ind", "optimizer.accumulate=3"))
    again(batch_at(0))
    for name, value in again.hosted.member(0).encoder.trunk[0][1].named_buffers():
        assert torch.equal(value, forward[name]), name


@pytest.mark.parametrize("structure", ["net", "branch"])
def test_layers_that_draw_are_keyed(structure):
    """Dropout is a function of seed, step and member: nothing that torch drew before changes it."""
    given = (*DRAWS, "method=ind", f"structure={structure}", "optimizer.accumulate=2")
    first, second = (build_step(configured(2, *given)) for _ in range(2))
    for n in range(2):
        torch.manual_seed(n)
        first(batch_at(n))
        torch.manual_seed(n + 10)
        second(batch_at(n))
    for part, weights in weights_of(first).items():
        torch.testing.assert_close(weights_of(second)[part], weights, atol=0, rtol=0)


def test_gradients_are_clipped_part_by_part():
    limit, norms = 0.01, {}
    step = build_step(configured(2, "method=ind", "structure=branch", f"optimizer.clip_norm={limit}"))
    for part in step.hosted.learners:
        gradients = [parameter for parameter in part.module.parameters()]
        part.optimizer.register_step_pre_hook(
            lambda *_, p=part, g=gradients: norms.update({p.name: torch.nn.utils.get_total_norm([x.grad for x in g])})
        )
    values = step(batch_at(0)).values
    assert {name: float(norm) for name, norm in norms.items()} == pytest.approx(
        {"member-0": limit, "member-1": limit, "trunk": limit}, rel=1e-3
    )
    assert values["member_0/gradient_norm"] > 10 * limit  # of the gradient itself, for the records


@pytest.fixture(scope="module")
def modern(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("modern")
    assert not train(run_dir, *MODERN, "method=dice")
    return run_dir / "tiny"


def test_an_interrupted_run_equals_one_that_was_not(tmp_path, modern):
    assert train(tmp_path, *MODERN, after_step=asked_after(6))
    assert not train(tmp_path, *MODERN)
    assert_same_run(tmp_path / "tiny", modern)


def test_the_average_is_what_is_evaluated_and_exported(modern):
    trainer = build(modern.parent, *MODERN)
    member, averaged = trainer.hosted.members[0], trainer.share.members.member(0)
    assert averaged is member.average.module and int(member.average.n_averaged) == 12
    assert not torch.equal(averaged.classifier.weight, member.module.classifier.weight)
    ensemble = load_ensemble(Run(modern), tell=lambda text: None)
    assert torch.equal(ensemble.classifiers[0].weight, averaged.classifier.weight)
    source = trainer.job.source
    evaluator = trainer.share.evaluator_of_members(12)
    (readings,) = evaluator.read(source.val, "images", [LOGITS])
    images = source.val.take(torch.arange(len(source.val)))
    logits = ensemble.classifiers[0](ensemble.encoders[0](ensemble.normalize(images)))
    torch.testing.assert_close(readings[0][LOGITS], logits, atol=1e-5, rtol=1e-5)


def test_an_average_may_begin_later(tmp_path, modern):
    """A checkpoint without one is continued: the average begins with the weights of the next step."""
    without = [key for key in MODERN if "ema" not in key]
    assert train(tmp_path, *without, after_step=asked_after(6))
    trainer = build(tmp_path, *MODERN, "resume.allow=[optimizer.ema]")
    assert int(trainer.hosted.members[0].average.n_averaged) == 0
    assert not of_kind(AVERAGED_WEIGHTS, tensors_of(trainer.run.checkpoint(), "member-0"))
