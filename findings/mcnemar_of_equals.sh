#!/usr/bin/env bash
# statsmodels 0.15.0: McNemar's test (exact=False) of two classifiers that give the same answers.
# Expected: p = 1 (or NaN), since no answer differs.
# Seen: the continuity correction is squared whatever its sign: |b − c| − 1 = −1, divided by b + c = 0.
#   no answer differs: statistic inf, p 0.0
#   5 against 5 answers: p 0.752, with exact=True 1.0
source "$(dirname "$0")/environment.sh" statsmodels==0.15.0 patsy formulaic interface-meta wrapt pandas
"$python" -W ignore - <<'PY'
from statsmodels.stats.contingency_tables import mcnemar

equal, balanced = mcnemar([[90, 0], [0, 10]], exact=False), mcnemar([[80, 5], [5, 10]], exact=False)
exact = mcnemar([[80, 5], [5, 10]], exact=True)
print(f"no answer differs: statistic {equal.statistic}, p {equal.pvalue}")
print(f"5 against 5 answers: p {balanced.pvalue:.3f}, with exact=True {exact.pvalue}")
assert equal.pvalue == 0 and round(balanced.pvalue, 3) == 0.752 and exact.pvalue == 1
PY
