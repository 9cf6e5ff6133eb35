"""Every refusal of the plan, each with its place and remedy, and what an accepted experiment becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.experiment import Experiment
from spec.facts import ClusterFacts, MachinePool, SharedService, Site, SyncerPorts
from spec.link import LinkConfig
from spec.plan import Plan
from spec.problems import DocumentError, Problem
from spec.refusals import ResolveError
from spec.resolve import resolve, resolve_located
from tests.builders.experiments import GIB, GPU, LOCAL, RUN, cluster, laptop, load, regions, resolved, shipped


def refused(
    text: str, *overrides: str, facts: Sequence[ClusterFacts] | None = None, env: Mapping[str, str] | None = None
) -> tuple[Problem, ...]:
    with pytest.raises(DocumentError) as caught:
        resolved(text, facts=facts, env=env, overrides=overrides)
    return caught.value.problems


def only(text: str, *overrides: str, facts: Sequence[ClusterFacts] | None = None) -> Problem:
    found = refused(text, *overrides, facts=facts)
    assert len(found) == 1, "\n".join(str(one) for one in found)
    return found[0]


def test_two_groups_of_eight_h200_are_16_ranks_on_two_a3_ultra_nodes() -> None:
    plan = resolved(GPU, facts=regions())
    (learner,) = plan.learners
    assert learner.world_size == 16
    assert [(node.name, node.machine, node.gpus, node.ranks) for node in learner.nodes] == [
        ("trainer-0", "a3-ultra", 8, 8),
        ("trainer-1", "a3-ultra", 8, 8),
    ]
    assert {(node.cpu, node.memory, node.shm) for node in learner.nodes} == {(220.0, 2800 * GIB, 700 * GIB)}
    assert (learner.gpu, learner.region, learner.job) == ("H200", "us-east5", "big-east-3fa9c1")


def test_two_single_node_groups_of_eight_h200_are_16_ranks_too() -> None:
    groups = (
        "- {name: front, nodes: 1, resources: {gpu: H200:8}}\n      - {name: back, nodes: 1, resources: {gpu: H200:8}}"
    )
    plan = resolved(GPU.replace("- {name: trainer, nodes: 2, resources: {gpu: H200:8}}", groups), facts=regions())
    assert plan.learners[0].world_size == 16
    assert [node.name for node in plan.learners[0].nodes] == ["front-0", "back-0"]


def test_h100_and_h200_in_one_learner_are_refused_with_the_lines_of_both() -> None:
    both = "- {name: a, resources: {gpu: H200:8}}\n      - {name: b, resources: {gpu: H100:8}}"
    text = GPU.replace("- {name: trainer, nodes: 2, resources: {gpu: H200:8}}", both)
    facts = [cluster("us-east5", pools={"a3-ultra": 2, "a3-high": 2})]
    found = only(text, facts=facts)
    assert (found.line, found.column) == (9, 36)
    assert found.message == (
        "learners[0].groups[1].resources.gpu: learner east mixes H200 and H100; one learner has one GPU type; "
        "see also t.yaml:8:36"
    )
    assert found.hint == "make each type a learner of its own; they join through sync"


def test_the_digits_recipe_fits_two_cores_and_24_gib_without_a_warning() -> None:
    document = load(shipped("digits").text, file="recipes/digits.yaml")
    plan = resolve_located(document, laptop(), run=RUN, env={}, run_uri="file:///w/runs/digits/r")
    assert plan.warnings == []
    assert [(one.name, one.cluster, one.world_size) for one in plan.learners] == [
        ("east", "local-0", 2),
        ("west", "local-1", 2),
    ]
    assert plan.home.data_manifest == "file:///w/.gkr/buckets/local-0/data/digits/manifest.json"
    assert plan.home.data_source == "sklearn-digits"
    assert plan.home.checkpoints == "file:///w/runs/digits/r/checkpoints/east"
    assert [[one.kind for one in learner.services] for learner in plan.learners] == [
        ["encode", "sample", "evaluate"],
        ["encode"],
    ]
    syncer = plan.syncer
    assert syncer is not None
    assert (syncer.store, syncer.control_port, syncer.bulk_port) == ("file:///w/runs/digits/r/sync", 0, 0)
    assert plan.train is not None
    assert syncer.round_samples == syncer.config.inner_steps * plan.train.batch
    assert syncer.target_samples // (2 * syncer.round_samples) >= 8


def test_the_portrait_recipe_resolves_in_two_regions() -> None:
    document = load(shipped("portrait-2b").text, file="recipes/portrait-2b.yaml")
    plan = resolve_located(document, regions(), run=RUN, env={"WANDB_API_KEY": "hidden"})
    assert [(one.gpu, one.world_size) for one in plan.learners] == [("H200", 16), ("H100-MEGA", 32)]
    assert [one.data_manifest for one in plan.learners] == [
        "gs://gkr-us-east5/data/portraits/manifest.json",
        "gs://gkr-us-central1/data/portraits/manifest.json",
    ]
    assert plan.learners[1].checkpoints == f"gs://gkr-us-central1/runs/portrait-2b/{RUN}/checkpoints/central"
    assert plan.learners[1].image == "us-central1-registry/gkr/trainer"
    assert plan.home.services[1].shared_endpoints == ["tcp://judge.platform:7500"]
    assert plan.warnings == [
        "service encoder asks for H200; at learner central it gets that learner's own type, H100-MEGA",
        "no service of kind sample: the merged model will not be evaluated",
    ]
    syncer = plan.syncer
    assert syncer is not None
    assert (syncer.control_port, syncer.bulk_port) == (7400, 7401)


def test_a_value_from_the_callers_environment_is_in_the_plan_by_name_only() -> None:
    plan = resolved(LOCAL + "env: {WANDB_API_KEY: , A: b}\n", env={"WANDB_API_KEY": "hidden"})
    assert (plan.env, plan.env_from_caller) == ({"A": "b"}, ["WANDB_API_KEY"])
    assert "hidden" not in plan.write_json()


def test_a_plan_reads_back_to_itself_and_ignores_what_a_newer_writer_added() -> None:
    plan = resolved(LOCAL)
    assert Plan.read_json(plan.write_json()) == plan
    newer = (
        plan.write_json()
        .replace('{"version":1', '{"version":1,"later":true', 1)
        .replace('"batch":', '"later":1,"batch":', 1)
    )
    assert Plan.read_json(newer) == plan


def test_an_unknown_cluster_names_the_near_one() -> None:
    found = only(LOCAL.replace("local-1", "locl-1"))
    assert (found.line, found.message, found.hint) == (
        9,
        'learners[1].cluster[0]: there is no cluster "locl-1"',
        'did you mean "local-1"?',
    )


@pytest.mark.parametrize(
    ("wanted", "want_cluster"),
    [("any", "full-enough"), ("[small, full-enough]", "full-enough"), ("[other, small]", "other")],
)
def test_the_first_cluster_in_the_order_of_preference_that_can_hold_the_learner_is_chosen(
    wanted: str, want_cluster: str
) -> None:
    facts = [
        cluster("small", pools={"a3-ultra": 1}),
        cluster("full-enough", pools={"a3-ultra": 2}),
        cluster("other", pools={"a3-ultra": 9}),
    ]
    plan = resolved(GPU.replace("us-east5", wanted), facts=facts)
    assert plan.home.cluster == want_cluster


def test_when_no_cluster_can_hold_the_learner_the_reason_of_each_is_given() -> None:
    facts = [cluster("a", pools={"a3-ultra": 1}), cluster("b", pools={"a3-high": 8})]
    found = only(GPU.replace("us-east5", "any"), facts=facts)
    assert found.message.endswith("a: asks for 2 nodes of a3-ultra, cluster a has 1; b: cluster b has no H200")
    assert found.line == 6


def test_a_gpu_type_that_the_cluster_lacks_says_what_it_has_and_who_has_it() -> None:
    facts = [*regions(), cluster("b", pools={"a4": 2})]
    found = only(GPU.replace("H200:8", "B200:8"), facts=facts)
    assert (found.line, found.column) == (8, 52)
    assert found.message.endswith("cluster us-east5 has no B200")
    assert found.hint == "us-east5 has H200; B200 is in b"


def test_a_gpu_type_is_never_matched_by_prefix() -> None:
    found = only(GPU.replace("H200:8", "H100:8"), facts=[cluster("us-east5", pools={"a3-mega": 4})])
    assert found.message.endswith("cluster us-east5 has no H100")
    assert found.hint == "us-east5 has H100-MEGA"


def test_more_nodes_than_the_cluster_has_are_refused_at_the_number() -> None:
    found = only(GPU.replace("nodes: 2", "nodes: 4"), "train.batch=64", facts=regions())
    assert (found.line, found.column) == (8, 32)
    assert found.message == "learners[0].groups[0].nodes: asks for 4 nodes of a3-ultra, cluster us-east5 has 3"
    assert found.hint == "at most nodes: 3, or another cluster"
    assert found.help == "nodes: Nodes of this shape."


def test_two_learners_of_one_cluster_share_its_nodes() -> None:
    second = "  - name: west\n    cluster: us-east5\n    groups: [{nodes: 2, resources: {gpu: H200:8}}]\ntrain:"
    found = only(GPU.replace("train:", second, 1), facts=regions())
    assert found.message.endswith("cluster us-east5 has 3, of which 1 are left beside the rest of this experiment")


def test_more_gpus_per_node_than_the_machine_has_propose_more_nodes() -> None:
    found = only(GPU.replace("H200:8", "H200:16"), facts=regions())
    assert found.message.endswith("H200:16 is more GPUs per node than a3-ultra has (8)")
    assert found.hint == "write nodes: 4 and gpu: H200:8"


def test_ranks_beside_gpus_must_be_the_gpus() -> None:
    found = only(GPU.replace("nodes: 2", "nodes: 2, ranks: 4"), facts=regions())
    assert found.hint == "remove ranks"


def test_a_batch_that_the_ranks_cannot_share_proposes_ones_that_they_can() -> None:
    found = only(LOCAL.replace("ranks: 2", "ranks: 3", 1), "train.batch=64")
    assert found.file == "--set train.batch=64"
    assert (
        found.message
        == "train.batch: 64 samples cannot be shared evenly by the 3 ranks of learner east; see also t.yaml:6:5"
    )
    assert found.hint == "use 60 or 66"


SIZES = ("data.buckets.step=8", "train.model.image_size=32")


def test_sizes_by_shape_have_about_the_pixels_of_a_square_batch_and_need_no_even_share() -> None:
    plan = resolved(LOCAL, overrides=[*SIZES, "train.batch=63"])
    found = {(one.width, one.height): one.batch for one in plan.buckets}
    assert found[32, 32] == 63
    assert {(40, 24), (24, 40)} <= found.keys()
    for (width, height), batch in found.items():
        assert max(width / height, height / width) <= 2
        assert width % 8 == height % 8 == 0
        assert 0 <= 63 * 32 * 32 - batch * width * height < width * height
    assert Plan.read_json(plan.write_json()) == plan
    assert not resolved(LOCAL).buckets
    assert "buckets" not in resolved(LOCAL).model_dump()


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["data.buckets.step=3"], "3 is not between the model's patches and its images", "one of 2, 4, 8, 16, 32"),
        (["data.buckets.step=12"], "12 is not between", "one of 2, 4, 8, 16, 32"),
        (["data.buckets.max_aspect=1"], "step 8 and max_aspect 1 make 1 sizes", "lower step or raise max_aspect"),
        (
            ["data.buckets.step=2", "data.buckets.max_aspect=16", "train.model.image_size=512"],
            "step 2 and max_aspect 16 make 385 sizes",
            "raise step or lower max_aspect",
        ),
        (["train.batch=1"], "train.batch: 1 samples cannot be shared by the 2 ranks of learner east", "at least 2"),
    ],
)
def test_sizes_that_fit_no_model_are_refused(overrides: list[str], message: str, hint: str) -> None:
    found = refused(LOCAL, *SIZES, *overrides)[0]
    assert message in found.message
    assert hint in found.hint


def test_a_shard_size_that_does_not_divide_the_ranks_lists_those_that_do() -> None:
    found = only(GPU, "train.shard_size=3", facts=regions())
    assert found.message == "train.shard_size: 3 does not divide the 16 ranks of learner east"
    assert found.hint == "one of 1, 2, 4, 8, 16"


@pytest.mark.parametrize(
    ("ports", "want"),
    [
        ((7400, 7400), "are both 7400"),
        ((80, 7400), "port 80 of us-east5 is outside 1024..65535"),
        ((7400, 70000), "port 70000 of us-east5 is outside"),
        ((6379, 7400), "port 6379 of us-east5 is one of Ray's"),
        (None, "name no ports for a syncer"),
    ],
)
def test_syncer_ports_that_cannot_work_are_refused(ports: tuple[int, int] | None, want: str) -> None:
    facts = [cluster("us-east5", pools={"a3-ultra": 2}, ports=ports)]
    assert want in only(GPU + "sync: {}\n", facts=facts).message


def test_names_too_long_for_cluster_objects_are_refused_with_a_shorter_one() -> None:
    found = only(LOCAL.replace("name: small", f"name: {'portrait-' * 4}x"))
    assert found.message.endswith(
        'with learner "east" and group "svc-encoder" makes names of cluster objects 17 characters too long'
    )
    assert (found.line, found.hint) == (
        2,
        '"portrait-portrait-po" would do, or shorter names of learner and group',
    )


def test_a_variable_to_be_taken_from_the_caller_must_be_set_there() -> None:
    found = only(LOCAL + "env: {A: }\n")
    assert (found.line, found.column) == (18, 7)
    assert found.hint == "export A=... or write a value"


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("env: {WORLD_SIZE: 3}", "is set by the launcher"),
        ("env: {GKR_RUN: x}", "is set by the launcher"),
        ("env: {MY-VAR: x}", "is not a name of an environment variable"),
        ("env: {HF_TOKEN: abc}", "looks like a secret"),
        ("env: {WANDB_API_KEY: abc}", "looks like a secret"),
        ("queue: a\nenv: {hf: a}\nsecrets: [hf]", "is given in env and in secrets"),
    ],
)
def test_environment_that_would_break_or_leak_is_refused(line: str, want: str) -> None:
    assert want in only(LOCAL + line + "\n").message


def test_a_variable_that_only_resembles_a_secret_is_accepted() -> None:
    assert resolved(LOCAL + "env: {TOKENIZERS_PARALLELISM: 'false'}\n").env == {"TOKENIZERS_PARALLELISM": "false"}


def test_both_train_and_run_are_refused_with_both_places() -> None:
    found = only(LOCAL + "run: python x.py\n")
    assert (found.line, found.column) == (18, 1)
    assert found.message == "run: both train and run are given; exactly one says what runs; see also t.yaml:12:1"


def test_neither_train_nor_run_is_refused() -> None:
    found = only("version: 1\nname: a\ngroups: [{nodes: 1}]\n")
    assert found.message == "neither train nor run is given; nothing would be run"


def test_a_command_of_ones_own_is_planned_without_a_syncer() -> None:
    plan = resolved("version: 1\nname: a\ngroups: [{nodes: 2, ranks: 2}]\nrun: |\n  torchrun x.py\n")
    assert (plan.run_script, plan.syncer, plan.train, plan.home.world_size) == ("torchrun x.py\n", None, None, 4)
    assert plan.home.name == "a"
    assert plan.home.job == "a-3fa9c1"


def test_sync_with_a_command_of_ones_own_is_refused() -> None:
    assert "sync works with train only" in only("version: 1\nname: a\ngroups: [{nodes: 1}]\nrun: x\nsync: {}\n").message


def test_a_service_for_a_learner_that_does_not_exist_names_the_near_one() -> None:
    found = only(LOCAL.replace("{kind: sample}", "{kind: sample, learner: wst}"))
    assert (found.line, found.hint) == (16, 'did you mean "west"?')


def test_a_service_goes_where_learner_says() -> None:
    plan = resolved(LOCAL.replace("{kind: sample}", "{kind: sample, learner: west}"))
    assert [[one.name for one in learner.services] for learner in plan.learners] == [
        ["encoder", "judge"],
        ["encoder", "sampler"],
    ]


def test_what_all_ranks_may_queue_at_a_replica_is_within_half_of_its_memory() -> None:
    for plan in (resolved(LOCAL), resolved(LOCAL, overrides=["services.encoder.resources.memory=256Mi"])):
        for learner in plan.learners:
            for service in learner.services:
                assert 0 < service.queue_bytes <= 64 * 2**20
                assert service.queue_bytes * (learner.world_size + 1) <= service.memory // 2


def test_a_queue_that_could_fill_a_replica_is_refused_with_what_fits() -> None:
    text = LOCAL.replace("{kind: sample}", "{kind: sample, queue_bytes: 200Mi}")
    found = only(text)
    assert "3 clients of sampler with 200Mi each may fill more than half of a replica's 1Gi" in found.message
    assert "at most queue_bytes: 174762Ki, or resources.memory of 1200Mi" in found.hint
    fits = resolved(text.replace("200Mi", "174762Ki")).home.services
    assert next(one for one in fits if one.name == "sampler").queue_bytes == 174762 * 1024


def test_a_model_lies_in_the_learners_own_bucket_and_only_where_a_kind_serves_one() -> None:
    plain = resolved(LOCAL)
    text = LOCAL.replace("{kind: encode", '{kind: encode, model: "{bucket}/models/t5"')
    assert text != LOCAL
    plan = resolved(text)
    encoder = next(one for one in plan.home.services if one.kind == "encode")
    assert encoder.model.endswith("/models/t5")
    assert "{" not in encoder.model
    assert '"model":"' in encoder.write_json().replace(" ", "")
    assert '"model":"' not in "".join(one.write_json().replace(" ", "") for one in plain.home.services)
    found = only(LOCAL.replace("{kind: sample}", "{kind: sample, model: /models/x}"))
    assert "service sampler of kind sample takes no model" in found.message
    assert "{place} is not a placeholder" in only(text.replace("{bucket}/models", "{place}/models")).message
    shared = GPU + "  judge: {kind: evaluate, shared: true, model: /models/clip}\n"
    assert any("serves the model of its own stack" in one.message for one in refused(shared, facts=regions()))


def test_sync_with_one_learner_warns() -> None:
    plan = resolved(GPU + "sync: {}\n", facts=regions())
    assert "sync with one learner: outer rounds have nothing to merge with" in plan.warnings


def test_high_momentum_with_few_rounds_warns() -> None:
    plan = resolved(LOCAL + "sync: {inner_steps: 20, outer_momentum: 0.9}\n")
    assert any(
        re.fullmatch(r"outer_momentum 0.9 with about \d+ rounds; below 100 rounds 0.5 to 0.7 works better", warning)
        for warning in plan.warnings
    )


def test_a_run_shorter_than_one_round_warns() -> None:
    plan = resolved(LOCAL, overrides=["train.samples=64"])
    assert any("end the run before its first outer round" in one for one in plan.warnings)


@pytest.mark.parametrize(
    ("resources", "key", "want_hint"),
    [("{cpu: 3}", "cpu", "at most cpu: 2"), ("{memory: 25Gi}", "memory", "at most memory: 24Gi")],
)
def test_a_node_larger_than_the_machine_is_refused_at_the_quantity(resources: str, key: str, want_hint: str) -> None:
    found = refused(LOCAL.replace("{cpu: 1, memory: 2Gi}", resources, 1))[0]
    assert found.path == f"learners[0].groups[0].resources.{key}"
    assert (found.line, found.hint) == (7, want_hint)


def test_a_gpu_nodes_memory_beyond_the_machine_row_is_refused() -> None:
    found = only(GPU.replace("{gpu: H200:8}", "{gpu: H200:8, memory: 2900Gi}"), facts=regions())
    assert found.message.endswith("asks for 2900Gi of memory per node, one a3-ultra of us-east5 offers 2800Gi")


def test_part_of_a_machines_gpus_gets_its_share_of_cpu_and_memory() -> None:
    plan = resolved(
        GPU.replace("nodes: 2, resources: {gpu: H200:8}", "nodes: 1, resources: {gpu: H200:2}"), facts=regions()
    )
    node = plan.home.nodes[0]
    assert (node.ranks, node.cpu, node.memory) == (2, 55.0, 700 * GIB)


def test_on_one_machine_the_memory_of_everything_together_must_fit() -> None:
    found = only(LOCAL, facts=laptop(2, memory_gib=7))
    assert found.message == "learners: nodes and services together ask for 8Gi, this machine has 7Gi"
    assert found.line == 3


def test_on_one_machine_too_many_cores_are_only_a_warning() -> None:
    assert any("ask for 6 cores" in one for one in resolved(LOCAL, facts=laptop(1)).warnings)


def test_shm_is_counted_inside_memory() -> None:
    found = only(LOCAL.replace("memory: 2Gi}", "memory: 2Gi, shm: 3Gi}", 1))
    assert found.message.endswith("shm is larger than memory, which contains it")


def test_a_shared_service_without_an_endpoint_in_the_facts_is_refused() -> None:
    text = GPU + "  judge: {kind: evaluate, shared: true}\n"
    found = only(text, facts=[cluster("us-east5", pools={"a3-ultra": 2})])
    assert (found.line, found.path) == (13, "services.judge.shared")
    assert found.hint == "remove shared: true to start a private one"
    empty = {"judge": SharedService(kind="evaluate", endpoints=[])}
    assert "has no endpoint" in only(text, facts=[cluster("us-east5", pools={"a3-ultra": 2}, services=empty)]).message


def test_a_shared_service_is_asked_by_the_platforms_name_with_the_platforms_token() -> None:
    text = GPU + "  scorer: {kind: evaluate, shared: true}\n"
    found = {"judge": SharedService(kind="evaluate", endpoints=["tcp://judge.platform:7500"], secret="gkr-services")}
    plan = resolve_located(load(text), [cluster("us-east5", pools={"a3-ultra": 2}, services=found)], run=RUN, env={})
    [scorer] = [one for one in plan.home.services if one.kind == "evaluate"]
    assert (scorer.name, scorer.answers_to, scorer.shared_secret) == ("scorer", "judge", "gkr-services")
    assert scorer.client("east/rank-0", run=RUN) == f"{RUN}/east/rank-0", "other runs have learners of that name too"
    [encoder] = [one for one in plan.home.services if one.kind == "encode"]
    assert encoder.client("east/rank-0", run=RUN) == "east/rank-0"


def test_a_service_with_a_gpu_type_of_no_learner_is_refused() -> None:
    found = only(GPU.replace("{kind: encode}", "{kind: encode, resources: {gpu: B200:1}}"), facts=regions())
    assert found.hint == "write gpu: H200:1"


def test_gpu_replicas_need_machines_besides_the_groups() -> None:
    text = GPU.replace("{kind: encode}", "{kind: encode, replicas: 9, resources: {gpu: H200:1}}")
    found = only(text, facts=regions())
    assert found.message.endswith("service replicas of learner east need 2 more a3-ultra nodes, us-east5 has 1 left")


def test_text_conditioning_without_an_encoder_is_refused() -> None:
    text = LOCAL.replace("  encoder: {kind: encode}\n", "")
    assert "no service of kind encode" in only(text).message
    assert resolved(text, overrides=["train.model.conditioning=class"]).home.world_size == 2


def test_a_language_model_needs_text_and_no_services() -> None:
    text = LOCAL.replace("recipe: digits", "recipe: docstrings")
    without = text.partition("services:")[0]
    assert resolved(without).home.services == []
    found = only(without + "services: {encoder: {kind: encode}}\n")
    assert found.message.endswith("a service of kind encode is for image models; train.model.kind is lm")
    other = only(LOCAL.replace('manifest.json"}', 'manifest.json", source: python-docstrings}'))
    assert "python-docstrings is for a model of kind lm; train.model.kind is dit" in other.message
    assert other.hint == "sources for dit: sklearn-digits"


def test_train_without_data_is_refused() -> None:
    text = LOCAL.replace('data: {manifest: "{bucket}/d/manifest.json"}\n', "")
    assert only(text).message == "train: train needs data.manifest"


@pytest.mark.parametrize(
    ("manifest", "want"),
    [
        ("{bukket}/d", "{bukket} is not a placeholder"),
        ("d/m.json", "is not a URI"),
        ("https://b/m.json", "is in no store that is known"),
    ],
)
def test_a_manifest_that_nobody_can_open_is_refused(manifest: str, want: str) -> None:
    found = refused(LOCAL.replace("{bucket}/d/manifest.json", manifest))[0]
    assert want in found.message
    assert found.path == "data.manifest"


@pytest.mark.parametrize("manifest", ["s3://b/m.json", "gs://b/m.json", "file:///b/m.json"])
def test_a_dataset_may_lie_in_any_store(manifest: str) -> None:
    plan = resolved(LOCAL.replace("{bucket}/d/manifest.json", manifest))
    assert {one.data_manifest for one in plan.learners} == {manifest}


def test_a_queue_that_does_not_exist_names_the_near_one_and_one_is_chosen_by_default() -> None:
    found = only(GPU + "queue: reserch\n", facts=regions())
    assert found.hint == 'did you mean "research"?'
    assert resolved(GPU, facts=regions()).learners[0].queue == "research"


def test_learners_and_their_short_form_together_are_refused() -> None:
    found = only(LOCAL + "cluster: local-0\n")
    assert "is the short form for one learner" in found.message


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ("name: west", "name: east", 'two learners are called "east"'),
        ("name: west", "name: run", '"run" is reserved'),
        ("{name: trainer", "{name: head", 'group name "head" is reserved for the head of the Ray cluster'),
        ("{name: trainer", "{name: svc-a", 'group name "svc-a" is reserved for services'),
    ],
)
def test_names_that_would_mix_things_up_are_refused(old: str, new: str, want: str) -> None:
    assert want in refused(LOCAL.replace(old, new))[0].message


def test_a_quorum_that_can_never_be_reached_is_refused() -> None:
    assert only(LOCAL + "sync: {quorum: 3}\n").hint == "at most 2"


def test_a_lease_below_two_heartbeats_is_refused() -> None:
    assert only(LOCAL + "sync: {lease: 3s}\n").hint == "at least 4s"


def test_a_link_reaches_the_plan_of_its_learner_also_from_the_command_line() -> None:
    flags = ["learners.west.link.delay=75ms", "learners.west.link.partitions=[{after: 30s, lasts: 20s}]"]
    plan = resolved(LOCAL, overrides=[*flags, "learners.west.link.rate=100Mbit", "learners.west.link.loss=0.1%"])
    assert plan.learner("east").link is None
    want = LinkConfig.model_validate(
        {"delay": "75ms", "rate": "100Mbit", "loss": "0.1%", "partitions": [{"after": "30s", "lasts": "20s"}]}
    )
    assert Plan.read_json(plan.write_json()).learner("west").link == want
    assert only(LOCAL, "learners.west.link.loss=100%").path == "learners[1].link.loss"


def test_a_link_on_a_cluster_or_without_our_trainer_is_refused() -> None:
    found = only(GPU, "learners.east.link.delay=75ms", facts=regions())
    assert found.path == "learners[0].link"
    assert "us-east5" in found.message
    own = "version: 1\nname: a\nlearners: [{name: b, groups: [{nodes: 1}], link: {delay: 1ms}}]\nrun: x\n"
    assert "link works with train only" in only(own).message


def test_all_refusals_of_an_experiment_come_at_once() -> None:
    found = refused(
        LOCAL.replace("local-1", "nowhere"), "train.batch=63", "services.judge.learner=x", "env.A=", "sync.quorum=9"
    )
    assert {one.path for one in found} == {
        "learners[1].cluster[0]",
        "train.batch",
        "services.judge.learner",
        "env.A",
        "sync.quorum",
    }


def test_without_places_a_refusal_still_names_its_path() -> None:
    document = load(LOCAL, overrides=["train.batch=63"])
    with pytest.raises(ResolveError) as caught:
        resolve(document.value, laptop(), run=RUN, env={})
    assert "train.batch: error: 63 samples cannot be shared evenly" in str(caught.value)
    assert isinstance(document.value, Experiment)


@given(
    nodes=st.integers(1, 6),
    gpus=st.integers(1, 8),
    has=st.integers(0, 6),
    batch=st.integers(1, 4096),
    replicas=st.integers(1, 9),
)
def test_a_plan_never_takes_more_than_the_cluster_has(
    nodes: int, gpus: int, has: int, batch: int, replicas: int
) -> None:
    facts = [
        ClusterFacts(
            name="c", region="c", backend="kubernetes", bucket="gs://b", queues=["q"],
            pools=[MachinePool(machine="a3-ultra", nodes=has)], syncer=SyncerPorts(control_port=7101, bulk_port=7102),
        )
    ]  # fmt: skip
    text = GPU.replace("us-east5", "c").replace("nodes: 2", f"nodes: {nodes}").replace("H200:8", f"H200:{gpus}")
    text = text.replace("{kind: encode}", f"{{kind: encode, replicas: {replicas}, resources: {{gpu: H200:1}}}}")
    fits = nodes + -(-replicas // 8) <= has and batch % (nodes * gpus) == 0
    document = load(text, overrides=[f"train.batch={batch}"])
    if fits:
        plan = resolve_located(document, facts, run=RUN, env={})
        assert (len(plan.home.nodes), plan.home.world_size) == (nodes, nodes * gpus)
    else:
        with pytest.raises(DocumentError):
            resolve_located(document, facts, run=RUN, env={})


def test_one_learner_gets_a_syncer_whose_outer_step_is_plain_training() -> None:
    """Decision 0006: one path for every run of our trainer."""
    facts = [
        ClusterFacts(
            name="c", region="c", backend="kubernetes", bucket="gs://b", queues=["q"],
            pools=[MachinePool(machine="a3-ultra", nodes=2)], syncer=SyncerPorts(control_port=7101, bulk_port=7102),
        )
    ]  # fmt: skip
    plan = resolve_located(load(GPU.replace("us-east5", "c")), facts, run=RUN, env={})
    assert len(plan.learners) == 1
    assert plan.syncer is not None
    assert (plan.syncer.config.outer_learning_rate, plan.syncer.config.outer_momentum) == (1.0, 0.0)


TWO_LEARNERS = """
version: 1
name: pair
image: trainer
learners:
  - {name: east, cluster: us-east5, groups: [{resources: {gpu: "H200:8"}}]}
  - {name: west, cluster: us-east5, groups: [{resources: {gpu: "H200:8"}}]}
train: {recipe: digits, batch: 64}
data: {manifest: "{bucket}/d/manifest.json"}
services: {encoder: {kind: encode}}
"""


def test_learners_of_one_cluster_take_its_namespaces_in_turn_and_reach_the_syncer_by_its_name() -> None:
    facts = [one.model_copy(update={"namespaces": ["a", "b"]}) for one in regions()]
    plan = resolved(TWO_LEARNERS, facts=facts)
    assert [one.namespace for one in plan.learners] == ["a", "b"]
    assert plan.syncer is not None
    assert (plan.syncer.namespace, plan.syncer.outer_host) == ("a", "")
    assert {one.syncer_control for one in plan.learners} == {f"{plan.syncer.name}.a:7400"}
    assert {one.syncer_bulk for one in plan.learners} == {f"{plan.syncer.name}.a:7401"}


def test_a_learner_of_another_cluster_reaches_the_syncer_by_the_host_of_the_facts() -> None:
    text = TWO_LEARNERS.replace(
        '{name: west, cluster: us-east5, groups: [{resources: {gpu: "H200:8"}}]}',
        '{name: west, cluster: us-central1, groups: [{resources: {gpu: "H100-MEGA:8"}}]}',
    )
    plan = resolved(text, facts=regions())
    assert plan.syncer is not None
    assert plan.syncer.outer_host == "10.64.0.7"
    assert plan.learner("west").syncer_control == "10.64.0.7:7400"
    assert plan.learner("east").syncer_bulk == f"{plan.syncer.name}.research:7401"
    hidden = [cluster(one.name, pools={p.machine: p.nodes for p in one.pools}, host="") for one in regions()]
    found = only(text, facts=hidden)
    assert "cannot reach a syncer in us-east5" in found.message
    assert found.path == "learners[1].cluster"


def test_the_cluster_names_an_image_where_the_experiment_does_not() -> None:
    facts = [one.model_copy(update={"site": Site(image="trainer")}) for one in regions()]
    plan = resolve_located(load(TWO_LEARNERS.replace("image: trainer\n", "")), facts, run=RUN, env={})
    assert plan.home.image == "us-east5-registry/gkr/trainer"
    assert plan.home.run_uri == f"gs://gkr-us-east5/runs/pair/{RUN}"


def test_groups_and_private_services_together_are_at_most_seven_worker_groups() -> None:
    services = "services:\n" + "".join(f"  e{index}: {{kind: encode}}\n" for index in range(7))
    found = refused(TWO_LEARNERS.replace("services: {encoder: {kind: encode}}\n", services), facts=regions())
    found = [one for one in found if one.path.endswith("groups")]
    assert [one.path for one in found] == ["learners[0].groups", "learners[1].groups"]
    assert "1 groups and 7 services of learner east are 8 worker groups, at most 7 fit one job" in found[0].message


def test_two_buckets_of_one_name_are_refused() -> None:
    """A run across two beds once took one learner's events for the other's: both buckets were s3://gkr."""
    text = TWO_LEARNERS.replace(
        '{name: west, cluster: us-east5, groups: [{resources: {gpu: "H200:8"}}]}',
        '{name: west, cluster: us-central1, groups: [{resources: {gpu: "H100-MEGA:8"}}]}',
    )
    facts = [
        one.model_copy(
            update={"bucket": "s3://gkr", "site": Site(bucket_env={"AWS_ENDPOINT_URL": f"http://{one.name}:9000"})}
        )
        for one in regions()
    ]
    found = only(text, facts=facts)
    assert "us-east5 and us-central1 call two different buckets s3://gkr" in found.message


MIXED = """
version: 1
name: mixed
groups: [{nodes: 1, ranks: 1, resources: {cpu: 1, memory: 2Gi}}]
train: {recipe: digits, model: {conditioning: class}}
data:
  manifest: "{bucket}/data/digits/manifest.json"
  weight: 3
  more: [{manifest: "{bucket}/data/other/manifest.json"}]
"""


def test_datasets_that_are_mixed_in_are_in_the_plan_with_all_weights() -> None:
    (learner,) = resolved(MIXED).learners
    assert [learner.data_manifest, *learner.data_more] == [
        learner.data_manifest,
        learner.data_manifest.replace("digits", "other"),
    ]
    assert learner.data_weights == [3, 1]
    (alone,) = resolved(MIXED.replace("weight: 3", "").replace("  more:", "# ")).learners
    assert (alone.data_more, alone.data_weights, alone.data_cache_limit) == ([], [], None)
    (limited,) = resolved(MIXED.replace("weight: 3", "cache_limit: 2Ti")).learners
    assert limited.data_cache_limit == 2 * 2**40


def test_a_dataset_that_is_mixed_in_twice_is_refused() -> None:
    found = only(MIXED.replace("other", "digits"))
    assert (found.path, "is there twice" in found.message) == ("data.more[0].manifest", True)
