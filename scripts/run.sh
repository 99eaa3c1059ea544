#!/bin/sh
# From a fresh clone to a run: makes .venv, installs the launcher into it, and starts it.
#   ./scripts/run.sh mnist          the same as `narrowgauge run mnist`
# Everything after the script's name goes to `narrowgauge run`. A second start installs nothing.
# It also writes .env, so that `docker compose run` is the same user with the same data.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=$root/.venv
stamp=$venv/.narrowgauge-installed

# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"

say() { printf '%s\n' "$*" >&2; }

find_python() {
    for name in python3.13 python3.12 python3.11 python3.10 python3; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$name"
            return 0
        fi
    done
    say "run.sh: the launcher needs Python 3.10 or newer, and there is none on the PATH"
    if command -v python3 >/dev/null 2>&1; then say "why:  python3 is $(python3 -V 2>&1)"; fi
    say "next: sudo apt-get install python3 python3-venv   (Debian 12, Ubuntu 22.04 or newer)"
    return 14
}

need_venv() {
    if "$1" -c 'import ensurepip, venv' 2>/dev/null; then return 0; fi
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "run.sh: $1 cannot make virtual environments"
    say "why:  its modules venv and ensurepip are a package of their own on Debian and Ubuntu"
    say "next: sudo apt-get install python$version-venv"
    return 14
}

wanted=$(cksum "$root/pyproject.toml")
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    python=$(find_python)
    need_venv "$python"
    say "installing the launcher into .venv: about 80 MB, half a minute on a fast line"
    started=$(date +%s)
    if [ ! -x "$venv/bin/python" ]; then "$python" -m venv --clear "$venv"; fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root" || {
        say "run.sh: the launcher could not be installed; pip says why above"
        say "next: is the package index reachable from here? Then start this again"
        exit 14
    }
    printf '%s\n' "$wanted" >"$stamp"
    say "installed in $(($(date +%s) - started)) s"
fi

# The rule of narrowgauge.data: XDG asks that a relative path be ignored.
case ${XDG_DATA_HOME:-} in
/*) data=$XDG_DATA_HOME/narrowgauge/data ;;
*) data=$HOME/.local/share/narrowgauge/data ;;
esac
# What another script chose stays: which target this host gets, the launcher decides later.
target=$(sed -n 's/^NARROWGAUGE_TARGET=//p' "$root/.env" 2>/dev/null | tail -n 1)
# A folder that is missing would be made by Docker, as root.
if ! mkdir -p "$data" || ! write_env "$root" "${target:-cpu}" "$data"; then
    say "run.sh: .env is not written, so give docker compose NARROWGAUGE_UID and NARROWGAUGE_GID"
fi

exec "$venv/bin/narrowgauge" run "$@"
