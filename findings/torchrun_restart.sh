#!/usr/bin/env bash
# torch 2.15.0: `torchrun --standalone --max-restarts 1`; the first try ends with an error.
# Expected: the second try has a store without the keys of the first, and gloo connects again.
# Seen: it finds the keys, among them the addresses of processes that have ended. In three of five runs of two processes
# the second try's init_process_group("gloo") did not connect, or waited until its timeout.
# With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 the second try has a store of its own.
#   keys of the first try: shared True, not shared False
source "$(dirname "$0")/environment.sh" torch==2.15.0 numpy
cat >try.py <<'PY'
import os
import sys
from pathlib import Path

import torch.distributed as dist

store, rank, world = next(dist.rendezvous("env://"))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    store.set("address", "of the first try")
    sys.exit(1)
Path(sys.argv[1]).write_text(str(store.check(["address"])))
PY
for disabled in 0 1; do
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=$disabled "$python" -m torch.distributed.run --standalone --nproc-per-node 1 \
        --max-restarts 1 --monitor-interval 1 try.py "$disabled" >log 2>&1 || cat log
done
echo "keys of the first try: shared $(cat 0), not shared $(cat 1)"
[ "$(cat 0) $(cat 1)" = "True False" ]
