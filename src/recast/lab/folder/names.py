"""Names of the files and folders of a run folder. No other module spells them."""

from __future__ import annotations

RECIPE = "recipe.yaml"
"""The complete recipe. A folder with this file is a run."""
CLASSES = "classes.json"
FINGERPRINT = "data.json"
"""Fingerprint of the data, `recast.lab.data.fingerprint`."""
DUPLICATES = "duplicates.csv"
PARENT_WEIGHTS = "parent.safetensors"
"""The parent's weights, if they are random or the classifier is new."""
PARENT = "parent"
"""The only folder that a run folder may hold before the run: the training of its parent."""
ENVIRONMENT = "environment.json"
PLAN = "plan.json"
VERIFY_FILE = "verify.json"
SCHEDULE_FILE = "schedule.json"
METRICS_FILE = "metrics.jsonl"
FIRST = (
    CLASSES, FINGERPRINT, DUPLICATES, PARENT_WEIGHTS, RECIPE, ENVIRONMENT, PLAN, VERIFY_FILE,
    SCHEDULE_FILE, METRICS_FILE,
)  # fmt: skip
"""Files that a run writes before its first state, besides `PaperConfig.files`."""
WEIGHTS = "weights.safetensors"
STATES = "resume"
CONTROL = "finetuned"
"""The folder of the control arm, with its own metrics, weights and states."""
ROWS = "rows.csv"
DIFFERENCES = "differences.csv"
PROVENANCE = "evaluation.json"
SCORES = "scores"
ANALYSIS = "analysis"
EXPLAIN = "explain"
REPORT = "report.html"
LOCK = ".lock"
"""An empty file in a folder that is being written."""
