# Sourced by a finding with pinned requirements: makes a temporary environment, enters it and sets $python.
# RECAST_FINDINGS_PYTHON names a Python whose packages (torch: 5.5 GB) are used; only what it lacks is installed, without
# dependencies. Without it all are installed.
set -euo pipefail
base=${RECAST_FINDINGS_PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$base" -m venv "$folder"
python=$folder/bin/python
options=()
if [ -n "${RECAST_FINDINGS_PYTHON:-}" ]; then
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$base" -c "$site" >"$("$python" -c "$site")/base.pth"
    missing='import sys
from importlib.metadata import PackageNotFoundError, version
for pin in sys.argv[1:]:
    name, _, wanted = pin.partition("==")
    try:
        has = version(name)
    except PackageNotFoundError:
        has = None
    if has is None or wanted not in ("", has):
        print(pin)'
    set -- $("$python" -c "$missing" "$@")
    options=(--no-deps)
fi
[ $# = 0 ] || "$python" -m pip install --quiet --disable-pip-version-check "${options[@]}" "$@"
cd "$folder"
