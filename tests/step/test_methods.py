"""Every method's loss and gradients equal the plain references; also its messages and its refusals."""

import copy

import pytest
import torch
import yaml

from dicedist.algorithm import checks
from dicedist.algorithm.companion import TaughtMember
from dicedist.algorithm.messages import Sizes
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.randomness import generator
from dicedist.algorithm.schedules import Schedules
from dicedist.cluster.exchange import routes
from dicedist.cluster.placement import place
from dicedist.config.compose import CONF
from dicedist.config.schema import MethodConfig
from tests.support.references import Ensemble
from tests.support.steps import (
    CASES,
    CPU,
    ON_MAPS,
    STEPS_PER_EPOCH,
    STRONG,
    STRUCTURES,
    batch_at,
    build_step,
    configured,
    gradients_of,
    plan_of,
    side_for,
)


def method_named(name):
    return MethodConfig(**yaml.safe_load((CONF / "method" / f"{name}.yaml").read_text())["method"])


def test_every_method_is_listed_with_its_structures():
    assert sorted(path.stem for path in (CONF / "method").glob("*.yaml")) == sorted(STRUCTURES)
    for name, structures in STRUCTURES.items():
        assert (method_named(name).name, tuple(method_named(name).structures)) == (name, structures)


def assert_equals_reference(config, size=11):
    """At a step where the discriminator w is trained, its memory is filled, and every weight has moved."""
    step = build_step(config)
    width = config.network.inputs
    hosted, num_members, path = step.hosted, config.ensemble.size, []
    for n in (2, 3) if config.optimizer.ema else (3,):  # twice: then the average of both differs from the weights
        step(batch_at(n, 8, width, side_for(config.method.name)))
        path.append(copied_members(hosted))
    reference = Ensemble(
        [copy.deepcopy(hosted.member(i)) for i in range(num_members)],
        copy.deepcopy(hosted.trunk.module) if hosted.trunk else None,
        copy.deepcopy(hosted.shared_modules),
        copy.deepcopy(hosted.w),
        config,
        [copy.deepcopy(part.companion.module) for part in taught_members(hosted)],
        averaged_over(path, config),
    )
    seen = {}
    fused = [hosted.discriminator] if step.method.fused_head and hosted.discriminator else []
    for part in (*hosted.learners, *fused):
        part.optimizer.register_step_pre_hook(lambda *_, p=part: seen.update({p.name: gradients_of(p.module)}))
    taught = watch_lessons(step)
    batch = batch_at(5, size, width, side_for(config.method.name))
    values = step(batch).values
    where = (batch.epoch, batch.step_in_epoch)
    expected, gradients = reference.gradients(
        batch.images[0],
        batch.labels_B,
        Schedules(config).at(batch.epoch + batch.step_in_epoch / STEPS_PER_EPOCH),
        noise := [generator(CPU, config.seed, "z", *where, member) for member in range(num_members)],
        generator(CPU, config.seed, "redundancy", *where),
    )
    student = step.method.student(num_members)
    for name in [name for name in expected if "/" in name]:
        assert float(values[name]) == pytest.approx(float(expected.pop(name).detach()), rel=1e-6, abs=1e-6), name
    for name, value in expected.items():
        for member in range(num_members if student is None or name != "distillation" else student):
            own = value[member] if isinstance(value, list) else value
            assert float(values[f"member_{member}/{name}"]) == pytest.approx(float(own.detach()), rel=1e-6, abs=1e-6), (
                name
            )
    assert {(part, name) for part, named in seen.items() for name in named} == gradients.keys()
    for (part, name), gradient in gradients.items():
        torch.testing.assert_close(
            seen[part][name], gradient, atol=1e-6, rtol=1e-6, msg=lambda m, n=f"{part} {name}": f"{n}: {m}"
        )
    if not taught_members(hosted):
        return
    for member, (fool, of_encoder, tell, of_judge) in enumerate(reference.lessons(batch.images[0], noise)):
        for name, value in (("lesson", fool), ("companion", tell)):
            assert float(values[f"member_{member}/{name}"]) == pytest.approx(float(value.detach()), rel=1e-6), name
        for found, wanted in zip(taught[member], (of_encoder, of_judge), strict=True):
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                torch.testing.assert_close(
                    found[name], gradient, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )


def copied_members(hosted):
    """Copies of all members, and of their trunk."""
    members = [copy.deepcopy(hosted.member(member)) for member in hosted.members]
    return torch.nn.ModuleList([*members, *([copy.deepcopy(hosted.trunk.module)] if hosted.trunk else [])])


def averaged_over(path, config):
    """The plain mean of the weights after each step: so an average that warms up begins."""
    averaged = copy.deepcopy(path[0])
    for name, average in averaged.named_parameters():
        average.data = torch.stack([dict(one.named_parameters())[name].data for one in path]).mean(0)
    *members, trunk = averaged if len(averaged) > config.ensemble.size else [*averaged, None]
    return Ensemble(members, trunk, None, None, config)


def taught_members(hosted):
    return [part for part in hosted.members.values() if isinstance(part, TaughtMember)]


def watch_lessons(step):
    """By member with a companion: the gradients at the steps of its second optimizer, and of the companion's."""
    seen = {}
    for member, part in enumerate(taught_members(step.hosted)):
        companion, found = part.companion, ({}, {})
        part.second.register_step_pre_hook(
            lambda *_, m=part.module.encoder, into=found[0]: into.update(gradients_of(m))
        )
        companion.optimizer.register_step_pre_hook(
            lambda *_, m=companion.module, into=found[1]: into.update(gradients_of(m))
        )
        seen[member] = found
    return seen


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("method", "structure"), CASES)
def test_loss_and_gradients_equal_the_reference(method, structure):
    assert_equals_reference(configured(3, *STRONG, f"method={method}", f"structure={structure}"))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("method", "structure"), [case for case in CASES if case[0] not in ON_MAPS])
def test_loss_and_gradients_of_vectors_equal_the_reference(method, structure):
    small = ("data=digits", "network=mlp", "network.inputs=5", "network.width=16", "redundancy.num_samples=1")
    assert_equals_reference(configured(3, *STRONG, *small, f"method={method}", f"structure={structure}"))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "options",
    [
        ("method=dice", "redundancy.terms=rhs"),
        ("method=dice", "redundancy.terms=both", "ensemble.size=2"),
        ("method=dice", "redundancy.scale=one"),
        ("method=dice", "redundancy.scale=none", "redundancy.terms=both", "ensemble.size=2"),
        ("method=ce_cr", "redundancy.scale=none"),
        ("method=ce_cr", "redundancy.scale=0.3", "redundancy.terms=both"),
        ("method=dice", "redundancy.floor=0.8", "redundancy.terms=both"),
        ("method=cebr", "redundancy.terms=rhs", "ensemble.size=2"),
        ("method=okddip_dice", "ensemble.size=4", "method.terms.okddip.temperature=2"),
        ("method=one", "structure=branch", "network=wrn28_2", "ensemble.size=2"),
        ("method=okddip", "network.per_member=[resnet8,resnet8,wrn28_2]"),
        ("method=adp", "network.per_member=[resnet8,resnet20]", "ensemble.size=2"),
        ("method=okddip_e", "ensemble.size=2"),
        ("method=kdcl", "method.terms.kdcl.teacher=naive"),
        ("method=kdcl", "method.terms.kdcl.teacher=general", "method.terms.kdcl.ramp_up=false"),
        ("method=gpmr", "ensemble.size=2"),
        ("method=gal", "network=wrn28_2", "ensemble.size=2"),
        ("method=distill", "method.terms.distill.temperature=3", "method.terms.distill.labels=0.3"),
        ("method=distill", "structure=branch", "method.terms.distill.target=members"),
        ("method=dibs", "method.terms.dibs.kl=explicit", "ensemble.size=2"),
        ("method=ffl", "network.per_member=[resnet8,wrn28_2]", "ensemble.size=2"),
        ("method=afd", "ensemble.size=2", "method.terms.afd.ramp_up=false", "method.terms.afd.spares_norms=true"),
    ],
    ids=lambda options: " ".join(options),
)
def test_variants_equal_the_reference(options):
    assert_equals_reference(configured(3, *STRONG, *options), size=7)


@pytest.mark.usefixtures("double_precision")
def test_an_epoch_may_end_with_a_batch_of_one():
    for method in ("one", "okddip", "adp"):
        step = build_step(configured(3, f"method={method}"))
        assert all(value.isfinite() for value in step(batch_at(0, size=1)).values.values())


def test_student_and_who_is_compared():
    dice, okddip_dice = (Method(method_named(name)) for name in ("dice", "okddip_dice"))
    assert dice.student(4) is None and list(dice.compared(4)) == [0, 1, 2, 3]
    assert okddip_dice.student(4) == 3 and list(okddip_dice.compared(4)) == [0, 1, 2]


PIXELS, MAPS = ("pixel_gradient",), ("map", "logits")
LOGITS, GATED, ATTENDED, FEATURES = ("logits",), ("logits", "gate"), ("logits", "query", "key"), ("mean", "scale")


@pytest.mark.parametrize(
    ("method", "ranks", "expected"),
    [
        ("ind", 3, {}),
        ("ceb", 3, {}),
        ("adp", 2, {(0, 2): LOGITS, (1, 0): LOGITS, (1, 1): LOGITS}),
        ("one", 2, {(0, 2): GATED, (1, 0): GATED, (1, 1): GATED}),
        ("dice", 4, {(3, 0): FEATURES, (3, 1): FEATURES, (3, 2): FEATURES}),
        ("dice", 2, {(1, 0): FEATURES, (1, 1): FEATURES}),
        ("ce_cr", 4, {(3, 0): ("mean",), (3, 1): ("mean",), (3, 2): ("mean",)}),
        ("okddip", 3, {(0, 1): ATTENDED, (0, 2): LOGITS, (1, 0): ATTENDED, (1, 2): LOGITS, (2, 0): LOGITS,
                       (2, 1): LOGITS}),
        ("okddip_dice", 4, {(0, 1): ATTENDED, (0, 2): LOGITS, (1, 0): ATTENDED, (1, 2): LOGITS, (2, 0): LOGITS,
                            (2, 1): LOGITS, (3, 0): FEATURES, (3, 1): FEATURES}),
        ("okddip_e", 3, {(rank, peer): ATTENDED for rank in range(3) for peer in range(3) if rank != peer}),
        ("kdcl", 2, {(0, 2): LOGITS, (1, 0): LOGITS, (1, 1): LOGITS}),
        ("gal", 2, {(0, 2): PIXELS, (1, 0): PIXELS, (1, 1): PIXELS}),
        ("dibs", 4, {(3, 0): FEATURES, (3, 1): FEATURES, (3, 2): FEATURES}),
        ("ffl", 4, {(3, 0): MAPS, (3, 1): MAPS, (3, 2): MAPS}),
        ("ffl", 2, {(1, 0): MAPS, (1, 1): MAPS}),
        ("afd", 3, {(0, 2): MAPS[::-1], (1, 0): MAPS[::-1], (2, 1): MAPS[::-1]}),  # a ring
        ("okddip_dice", 3, {(0, 1): ATTENDED, (0, 2): LOGITS, (1, 0): ATTENDED, (1, 2): LOGITS,
                            (2, 0): (*FEATURES, "logits"), (2, 1): (*FEATURES, "logits")}),
    ],
)  # fmt: skip
def test_a_rank_receives_only_what_it_needs(method, ranks, expected):
    built = Method(method_named(method))
    placement = place(ranks, 3, built.counterpart is not None)
    settings = configured(3, f"method={method}").redundancy
    found = routes(placement, built.traffic([Sizes(64, 3072, 10, (64, 8, 8))] * 3, 10, settings))
    assert {(rank, member): names for (rank, member, replica), names in found.items()} == expected


@pytest.mark.parametrize(
    ("options", "size", "ranks", "line"),
    [
        (("method=okddip",), 2, 1, "method=okddip needs at least 3 members, got 2: write ensemble.size=3"),
        (("method=okddip_dice",), 2, 1, "needs at least 3 members"),
        (("method=adp",), 1, 1, "method=adp needs at least 2 members"),
        (("method=okddip", "network.per_member=[resnet8,wrn28_2,resnet8]"), 3, 1, r"features D .*\[64, 128\]"),
        (("method=one", "network.per_member=[resnet8,wrn28_2]"), 2, 1, r"trunks of one width, not \[32, 64\]"),
        (("method=one", "network.name=torchvision/resnet18"), 2, 1, "torchvision/resnet18 has no split point"),
        (("structure=branch", "method=ind", "network.name=torchvision/resnet18"), 2, 1, "or structure=net"),
        (("structure=branch", "method=ind", "network.per_member=[resnet8,wrn28_2]"), 2, 1, "cannot share a trunk"),
        (("network.per_member=[resnet8,resnet20,resnet8]",), 2, 1, "names 3 networks for 2 members"),
        (("structure=branch", "method=ind", "precision=fp16"), 2, 2, "write precision=bf16, or use one process"),
        (("method=okddip", "precision=fp16"), 3, 2, "write precision=bf16, or use one process"),
        (("structure=branch", "method=pcl", "optimizer.ema=null"), 2, 2, "write optimizer.ema=0.999"),
        (("structure=branch", "method=pcl", "optimizer.accumulate=2"), 2, 1, "write optimizer.accumulate=1"),
        (("method=gal", "compile=true"), 2, 1, "needs second derivatives: write compile=false"),
        (("method=gpmr", "ensemble.replicas=2"), 2, 2, "write ensemble.replicas=1"),
        (("method=gal", "precision=fp16"), 2, 1, "write precision=bf16"),
        (("method=afd", "compile=true"), 2, 1, "every batch twice, for two optimizers: write compile=false"),
        (("method=afd", "ensemble.replicas=2"), 2, 2, "write ensemble.replicas=1"),
        (("method=afd", "precision=fp16"), 2, 1, "write precision=bf16"),
        (("method=afd", "optimizer.accumulate=2"), 2, 1, "write optimizer.accumulate=1"),
        (("method=afd", "network.freeze=all"), 2, 1, "network.freeze freezes them entirely"),
        (("method=afd", "network.per_member=[resnet8,wrn28_2]"), 2, 1, "have 128x8x8 and 64x8x8: leave out"),
        (("method=afd", "network=mlp", "data=digits", "network.inputs=5"), 2, 1, "reads the maps before pooling"),
        (("method=ffl", "network.name=torchvision/resnet18"), 2, 1, "this network does not return them: write network"),
        (("method=ffl", "optimizer.ema=0.9"), 2, 1, "write optimizer.ema=null"),
        (("method=ffl", "loss.mixup=0.2"), 2, 1, "its term ffl needs one class for each input"),
        (("method=kdcl", "method.terms.kdcl.teacher=general", "data.split=full"), 2, 1, "write data.split=holdout"),
        (("method=kdcl", "method.terms.kdcl.teacher=general", "evaluate.every_epochs=2"), 2, 1, "every_epochs=1"),
    ],
)  # fmt: skip
def test_misfits_are_one_line(options, size, ranks, line):
    config = configured(size, *options)
    method = Method(config.method)
    with pytest.raises(ValueError, match=line) as raised:
        checks.check_members(config, method, plan_of(config), min(ranks, size), 1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "shares", "line"),
    [
        ((), 4, "4 ranks cannot divide 3 pairs of members: write redundancy.ranks=3"),
        (("redundancy.max_pairs=2",), 3, "3 ranks cannot divide 2 pairs of members: write redundancy.ranks=2"),
        (("method=dibs",), 2, "method=dibs has a discriminator that one rank holds: write redundancy.ranks=1"),
    ],
)
def test_a_discriminator_that_cannot_be_divided(options, shares, line):
    config = configured(3, *options, f"redundancy.ranks={shares}")
    with pytest.raises(ValueError, match=line):
        checks.check_members(config, Method(config.method), plan_of(config), 3, shares)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("method=dml", "structure=branch"), "method=dml has no structure=branch: write structure=net"),
        (("method=cl_ilr",), "method=cl_ilr has no structure=net: write structure=branch"),
        (("method=afd", "structure=branch"), "method=afd has no structure=branch: write structure=net"),
        (("method=oddkip",), "did you mean okddip"),
        (("method=kdcl", "structure=branch"), "method=kdcl has no structure=branch: write structure=net"),
    ],
)
def test_a_method_without_that_structure(options, line):
    with pytest.raises(ValueError, match=line):
        configured(3, *options)


def test_a_temperature_must_be_positive():
    config = configured(3, "method=okddip", "method.terms.okddip.temperature=0")
    with pytest.raises(ValueError, match="distillation with temperature=0: write a number above 0"):
        Method(config.method)
