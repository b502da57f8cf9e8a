"""FineRMoE's ten tasks: their names, examples and table."""

import json

from moe_trainer.commands import evaluate
from moe_trainer.evaluation.finermoe import FINERMOE
from moe_trainer.evaluation.options import TaskOptions, split_names
from moe_trainer.evaluation.task_groups import expand_tasks

PAPER_7B = (73.08, 71.22, 79.51, 75.69, 63.40, 86.95, 56.70, 69.4, 85.37, 39.06)


def write_results(path, values):
    results = {
        each.task: {f"{each.metrics[0].partition(',')[0]},{each.metrics[0].partition(',')[2] or 'none'}": value / 100}
        for each, value in zip(FINERMOE.tasks, values, strict=False)
    }
    for entry in results.values():
        entry["acc_stderr,none"], entry["other,none"] = 0.5, 0.1
    path.write_text(json.dumps({"results": results}))
    return str(path)


def test_table_of_the_paper(tmp_path, capsys):
    """The ten figures of the paper's 7B model have its mean, 70.04; a model with fewer tasks has no mean."""
    files = [write_results(tmp_path / "7B.json", PAPER_7B), write_results(tmp_path / "part.json", PAPER_7B[:2])]
    assert evaluate.main(["--table", *files]) == 0
    head, _, full, part = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | MMLU | BBH |") and head.endswith("| GPQA | AVG |")
    assert full == "| 7B | 73.08 | 71.22 | 79.51 | 75.69 | 63.40 | 86.95 | 56.70 | 69.40 | 85.37 | 39.06 | 70.04 |"
    assert part == "| part | 73.08 | 71.22 |" + " - |" * 9


def test_group_of_ten_tasks_brings_its_examples():
    names, shots = expand_tasks(split_names(["finermoe, mine", "gsm8k"]), None)
    assert len(names) == 11 and names[-1] == "mine" and names[0] == "mmlu"
    options = TaskOptions(names, num_fewshot=shots)
    assert options.get_num_fewshot("mmlu") == 5 and options.get_num_fewshot("mine") is None
    assert expand_tasks(("finermoe",), 1)[1] == 1 and expand_tasks(("a",), None) == (("a",), None)
