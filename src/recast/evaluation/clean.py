"""Suite `clean`: accuracy and loss on the validation images as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch.nn import functional as F

from recast.evaluation.bench import Bench, Measurement, count_correct


def measure_clean(bench: Bench) -> Iterator[Measurement]:
    """top1 and top5 in percent (top5 from six classes on), loss = mean cross-entropy."""
    ks = (1, 5) if len(bench.data.classes) >= 6 else (1,)
    correct: Counter[tuple[str, int]] = Counter()
    loss = dict.fromkeys(bench.models, 0.0)
    for _, images, labels in bench.batches():
        for name in bench.models:
            logits = bench.logits(name, images)
            loss[name] += F.cross_entropy(logits.cpu().double(), labels.cpu(), reduction="sum").item()
            for k in ks:
                correct[name, k] += count_correct(logits, labels, k)
            bench.advance(len(labels))
    n = len(bench.data.val)
    for name in bench.models:
        for k in ks:
            yield Measurement(name, f"top{k}", 100 * correct[name, k] / n, n)
        yield Measurement(name, "loss", loss[name] / n, n)
