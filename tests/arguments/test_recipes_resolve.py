"""Published command lines are accepted, or refused only for features that are not implemented."""

import json

import model_zoo
from arguments.machine import check_machine
from arguments.parse import resolve_command_line
from arguments.rules import derived
from tests.arguments.moe_recipes import RECIPES, REFUSED, TABLE_11, as_file
from tests.arguments.rule_lines import ACCEPTED, base_line, findings, recorded

ARCHES = (None, 9, 10)


def assert_resolves_as_recorded(recipe: dict, argv: list[str], world_size: int | None) -> None:
    settings, violations = findings(argv, world_size)
    for arch in ARCHES:
        violations += [found for found in check_machine(settings, recipe["env"], arch) if found.kind not in ACCEPTED]
    left = [violation for violation in violations if violation.kind != "product"]
    assert not left, f"{recipe['name']}: {'; '.join(map(str, left))}"
    ours = derived(settings, world_size)
    if recipe["derived"]:
        assert ours["data_parallel_size"] == recipe["derived"]["dp"]
        assert ours["virtual_pipeline_model_parallel_size"] == recipe["derived"]["vpp"]
        assert ours["num_microbatches"] == recipe["derived"]["num_microbatches"]


def test_recorded_recipes_are_accepted():
    for recipe in recorded("recipes"):
        assert_resolves_as_recorded(recipe, recipe["argv"], recipe["world_size"])


def test_nemotron_recipes_are_accepted():
    """Hybrid models with multi-token prediction, of Megatron-LM's functional tests (d98e8a64)."""
    lightning, small, release = recorded("nemotron_recipes")
    for recipe in (lightning, small):
        assert_resolves_as_recorded(recipe, recipe["argv"], recipe["world_size"])
    for recipe in (lightning, small, release):  # the last one's environment is of Blackwell
        settings, violations = findings(recipe["argv"], recipe["world_size"])
        assert settings.mtp_num_layers == 2 and not [each for each in violations if each.kind != "product"]


def test_all_shared_recipes_are_accepted(shared):
    """No recipe that runs in Megatron-LM is refused."""
    recipes, refused = json.loads((shared / "reference" / "recipes.json").read_text()), {}
    assert len(recipes) > 140
    for recipe in recipes:
        fragment = recipe["world_size"] is None  # a few flags of a guide, to be added to a line
        argv, world_size = (base_line() + recipe["argv"], 8) if fragment else (recipe["argv"], recipe["world_size"])
        assert_resolves_as_recorded(recipe, argv, world_size)
        flags = {flag for violation in resolve_command_line(argv, world_size)[1] for flag in violation.flags}
        if flags:
            refused[recipe["name"]] = flags
    assert refused == {}


def test_only_fill_in_the_middle_flags_are_out_of_scope(shared):
    """Fill-in-the-middle data belong to dense research models."""
    refused = set()
    for recipe in json.loads((shared / "reference" / "recipes.json").read_text()):
        _, violations = findings(recipe["argv"], recipe["world_size"])
        refused |= {flag for v in violations if v.kind == "product" for flag in v.flags}
    assert {flag.split("-")[2] for flag in refused} <= {"fim"}, refused


def test_megatron_moe_recipes_pass_or_give_the_expected_error(tmp_path):
    problems = []
    for name, preset, world_size, settings in (*RECIPES, *TABLE_11):
        path = tmp_path / "recipe.yaml"
        path.write_text(as_file(model_zoo.find(preset).read_text(), settings))
        found = resolve_command_line(["--preset", str(path)], world_size)[1]
        reasons = REFUSED.get(name, ())
        reasons = (reasons,) if isinstance(reasons, str) else reasons
        if len(found) != len(reasons) or not all(map(lambda text, each: text in each.message, reasons, found)):
            problems.append(f"{name}: {found}")
    assert not problems, "\n".join(problems)
