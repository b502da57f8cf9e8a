"""The table of recipes in the manual, and small forms for the emulated device."""

from arguments import parse_args
from tests.arguments.moe_recipes import FILES, RECIPES
from tests.verification import prove_recipes


def test_page_matches_the_program():
    """`python tests/verification/prove_recipes.py --write` renews it."""
    assert prove_recipes.PAGE.read_text() == "\n".join(prove_recipes.page_lines()) + "\n"


def test_links_of_the_page_lead_to_the_files_of_the_recipes():
    for recipe, file in zip(prove_recipes.ALL, FILES, strict=False):
        name = recipe.name.split()[0]
        width = recipe.name.split()[1].strip(",").lower()
        assert file.startswith(f"{name}/{width}_") and f"_{recipe.ranks}GPU_" in file, (recipe.name, file)
    assert len(FILES) == len(RECIPES)


def test_every_valid_recipe_equals_one_process():
    """`python tests/verification/prove_recipes.py --equal --record NAME` renews the record of a recipe."""
    rows = [line.split(" | ") for line in prove_recipes.PAGE.read_text().splitlines() if " | fits | " in line]
    assert len(rows) == 24 and all(row[4].strip(" |") for row in rows)


def test_small_forms_keep_graphs_and_formats(tmp_path):
    recipe = next(recipe for recipe in prove_recipes.ALL if recipe.name == "table 11: DeepSeek-V3, GB200, BF16")
    args = parse_args(prove_recipes.device_argv(recipe, tmp_path), 2)
    assert args.training.captured_modules == {"attn", "moe_router", "moe_preprocess"}
    assert args.precision.bf16 and args.moe.moe_router_force_load_balancing
    assert args.moe.moe_token_dispatcher_type == "flex"


def test_a_small_form_runs_with_and_without_graphs(tmp_path):
    recipe = next(recipe for recipe in prove_recipes.ALL if recipe.name == "table 11: Qwen3-235B, H100, BF16")
    found = prove_recipes.runs_on_device(recipe, tmp_path)
    assert found.startswith("as without graphs (losses True") and "; 16 graphs; waits" in found, found
    assert "'memory/host_read.py': 4, 'training/step.py': 1" in found, "one wait of a layer and microbatch"
