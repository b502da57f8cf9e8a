"""The ten tasks of FineRMoE's evaluation.

Source: arXiv 2603.13364v1 for the tasks. Examples before a question: as is usual for these tasks (of the Qwen2.5 models
that FineRMoE continues, and of the harness); they are not known to be the paper's.
"""

from moe_trainer.evaluation.task_group import GroupTask, TaskGroup

FINERMOE = TaskGroup(
    "finermoe",
    "ten tasks",
    (
        GroupTask("MMLU", "mmlu", 5, ("acc",)),
        GroupTask("BBH", "bbh_cot_fewshot", 3, ("exact_match,get-answer", "exact_match")),
        GroupTask("HellaSwag", "hellaswag", 10, ("acc_norm",)),
        GroupTask("Winogrande", "winogrande", 5, ("acc",)),
        GroupTask("ARC-C", "arc_challenge", 25, ("acc_norm",)),
        GroupTask("ARC-E", "arc_easy", 25, ("acc_norm",)),
        GroupTask("AGIEval", "agieval_en", None, ("acc", "acc_norm")),
        GroupTask("MBPP", "mbpp", 3, ("pass_at_1", "pass@1")),
        GroupTask("GSM8K", "gsm8k", 4, ("exact_match,strict-match", "exact_match")),
        GroupTask("GPQA", "gpqa_main_n_shot", 5, ("acc_norm", "acc")),
    ),
)
