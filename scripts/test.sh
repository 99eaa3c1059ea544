#!/usr/bin/env bash
# The whole suite that is not marked slow or gpu, container tests included.
#   ./scripts/test.sh [--provision] [--no-docker] [--no-cluster] [--slow] [words for pytest]
# CI=1 or --provision installs and starts what is missing; otherwise it is listed and asked for.
# An engine that is already there is used as it is. --no-docker leaves the container tests out,
# --no-cluster those that start Slurm's daemons.
# Everything it makes is kept in .test/, so a second run is quicker.
# shellcheck disable=SC2317,SC2329 # most functions are started by `stage`
set -uo pipefail
# Each background job in a process group of its own, so that all of it can be ended.
set -m

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root" || exit 1

# Where it is set, each of some thousand processes compiles anew what it imports.
unset PYTHONDONTWRITEBYTECODE

state=${NARROWGAUGE_TEST_STATE:-$root/.test}
export NARROWGAUGE_TEST_BASE=${NARROWGAUGE_TEST_BASE:-narrowgauge-standin:cpu}
export NARROWGAUGE_TEST_WHEELS=$state/wheels
export NARROWGAUGE_TEST_BASE_DESKTOP=${NARROWGAUGE_TEST_BASE_DESKTOP:-narrowgauge-standin:desktop}
export NARROWGAUGE_TEST_WHEELS_DESKTOP=$state/wheels-desktop
logs=$state/logs reports=$state/reports stages=$state/stages.tsv
# shellcheck source=scripts/stages.sh
. scripts/stages.sh
# shellcheck source=scripts/provision.sh
. scripts/provision.sh

provision=${CI:+yes} docker=yes cluster=yes slow='' marks='not slow and not gpu' words=()
for word in "$@"; do
    case $word in
    --provision) provision=yes ;;
    --no-docker) docker= ;;
    --no-cluster) cluster= ;;
    --slow) slow=yes marks='not gpu' ;;
    -h | --help) sed -n '2,7p' "$0" && exit 0 ;;
    *) words+=("$word") ;;
    esac
done

#: venv NAME PYTHON REQUIREMENT...: a virtual environment under .test, made once per requirements.
venv() {
    local folder=$state/$1 python=$2 stamp
    shift 2
    stamp="$python $* $(cksum <pyproject.toml)"
    if [ -f "$folder/.stamp" ] && [ "$(cat "$folder/.stamp")" = "$stamp" ]; then return 0; fi
    # uv resolves and unpacks in seconds what takes pip a minute of a core.
    "$python" -m venv --clear "$folder" &&
        "$(own_uv)" pip install --quiet --python "$folder/bin/python" "$@" &&
        printf '%s' "$stamp" >"$folder/.stamp"
}

#: The Python whose pip downloads wheels: the newest, or an environment of its where that has no pip
#: (one that uv made, or Debian's).
python_with_pip() {
    if "$new_python" -m pip --version >/dev/null 2>&1; then
        echo "$new_python"
        return 0
    fi
    [ -x "$state/pip/bin/pip" ] || "$new_python" -m venv --clear "$state/pip" || return 1
    echo "$state/pip/bin/python"
}

#: run_tests LANE PYTHON FOLDER...: pytest with its report; no tests collected is a failure, unless
#: words of the caller's choose among them.
run_tests() {
    local lane=$1 python=$2 code=0
    shift 2
    # Several lanes share the cores here: threads that spin while they wait would steal from them.
    OMP_WAIT_POLICY=PASSIVE PYTHONPATH=src "$python" -m pytest -p no:cacheprovider -m "$marks" --durations=20 \
        --junitxml="$reports/$lane.xml" ${words[@]+"${words[@]}"} "$@" || code=$?
    [ "$code" -ne 5 ] || [ "${#words[@]}" -eq 0 ] || code=0
    return "$code"
}

#: build_kernels PYTHON: what knows nothing of torch is compiled for one torch and taken by others.
build_kernels() {
    local objects
    objects=$(PYTHONPATH=src "$1" -c 'import torch
from narrowgauge_kernels.sources import default_directory
print(default_directory(torch.__version__))')/objects || return 1
    mkdir -p "$objects"
    find src/narrowgauge_kernels/build -name '*.o' -exec cp -n {} "$objects" \; 2>/dev/null
    PYTHONPATH=src "$1" -m narrowgauge_kernels.build
}

#: Compiles device code for the capabilities that newer toolkits have dropped; needs no GPU.
nvrtc=nvidia-cuda-nvrtc-cu11==11.8.89
#: Count multiply-accumulates too: ours are held against theirs. They need torch 2.
counters=(fvcore==0.1.5.post20221221 ptflops==0.7.5)

#: A peer of our ensembles. It asks for torchvision, which brings a torch of its own, and never imports
#: it: installed without what it asks for.
ensembles=torchensemble==0.2.0

old_environment() { venv lab38 "$1" torch==1.8.0 numpy pillow tomli pytest hypothesis pytest-timeout; }

new_environment() {
    # shellcheck disable=SC2046 # one word per wheel
    venv lab311 "$1" --find-links "$state/wheels" $(lab_requirements "$1") \
        pillow pytest hypothesis pytest-timeout onnx onnxruntime joblib "$nvrtc" "${counters[@]}" ${slow:+triton==3.6.0 openvino jax} &&
        "$(own_uv)" pip install --quiet --no-deps --python "$state/lab311/bin/python" "$ensembles"
}

#: The wheels that the image takes, where this Python takes them too.
lab_requirements() {
    if "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        find "$state/wheels" -name '*.whl'
    else
        printf '%s\n' numpy torch
    fi
}

#: Kernels of both environments; image builds then find most of them compiled.
kernels_track() {
    stage lab311-kernels build_kernels "$state/lab311/bin/python" || return 1
    await lab38-install && stage lab38-kernels build_kernels "$state/lab38/bin/python" || return 1
    if [ -n "$docker" ]; then
        await base && stage objects scripts/standin.sh objects cpu \
            src/narrowgauge_kernels/build "$NARROWGAUGE_TEST_BASE" || return 1
    fi
}

#: What the older Python repeats of a folder: what of torch, Python or the kernels' build differs by
#: version. The slow tier repeats nearly all. Device code knows nothing of either: one environment
#: compiles it.
old_tests() {
    local name=$1 without=(--ignore=tests/kernels/test_device_code.py
        --ignore=tests/kernels/test_manual_float_emulation.py
        --ignore=tests/kernels/test_manual_codes_device.py
        --ignore=tests/kernels/test_sparse_compiling.py --ignore=tests/kernels/test_sparse_emulation.py)
    shift
    [ -n "$slow" ] || mapfile -t -O "${#without[@]}" without < <(sed -n 's/^[^#]/--ignore-glob=&/p' scripts/python38.without)
    stage "$name" run_tests "$name" "$state/lab38/bin/python" "$@" "${without[@]}"
}

#: What runs inside images, in two environments one after the other.
lab_track() {
    local code=0
    stage lab311-install new_environment "$new_python" && kernels_track || return 1
    stage lab311-tests run_tests lab311 "$state/lab311/bin/python" \
        tests/contract tests/kernels tests/lab tests/experiments || code=1
    old_tests lab38-tests tests/lab || code=1
    return "$code"
}

#: The rules that need no test: style, types, and what may be said on Python 3.8.
static_checks() {
    local bin=$state/host/bin
    "$bin/ruff" check . && "$bin/ruff" format --check . && "$bin/mypy" &&
        "$bin/vermin" --no-tips --eval-annotations --exclude tomllib -t=3.8- --violations \
            src/narrowgauge_contract src/narrowgauge_data src/narrowgauge_lab \
            src/narrowgauge_kernels src/narrowgauge_scores experiments
}

host_track() {
    local code=0
    stage host-install venv host "$new_python" --editable '.[test,dev,slurm,sweep,kubernetes]' || return 1
    stage static static_checks || code=1
    stage host-tests run_tests host "$state/host/bin/python" \
        tests/architecture tests/datasets tests/images tests/launcher tests/scores || code=1
    # The launcher and a torch of its own: what a reader of the tutorial has.
    { await lab311-kernels && NARROWGAUGE_TEST_LAB_PYTHON=$state/lab311/bin/python \
        stage tutorial run_tests tutorial "$state/host/bin/python" tests/tutorial; } || code=1
    if [ -n "$cluster" ]; then
        stage cluster-tests run_tests cluster "$state/host/bin/python" tests/cluster || code=1
    fi
    if [ -n "$docker" ]; then
        { await base && await wheels-desktop && await objects && stage container-tests run_tests containers "$state/host/bin/python" \
            tests/e2e; } || code=1
    fi
    # Here, so that both tracks end at about the same time.
    { await lab38-kernels && old_tests lab38-rest \
        tests/contract tests/kernels tests/datasets tests/scores tests/experiments; } || code=1
    return $code
}

#: What the image `desktop` is built on and of, here: Python 3.8 and the torch of that time.
desktop_track() {
    await base && stage base-desktop env PYTHON38="$old_python" \
        scripts/standin.sh base desktop "$state" "$NARROWGAUGE_TEST_BASE_DESKTOP" || return 1
    # Not before: it downloads the same torch, and pip keeps what it has downloaded.
    await lab38-install &&
        stage wheels-desktop scripts/standin.sh wheels desktop "$NARROWGAUGE_TEST_WHEELS_DESKTOP" "$pip_python"
}

finish() {
    trap - EXIT INT TERM
    local job
    for job in $(jobs -p); do kill -- "-$job" 2>/dev/null; done
    wait
    stop_engine
    exit "$1"
}

main() {
    local failed='' job
    stage uv provide_uv || return 1
    stage lab38-install old_environment "$old_python" &
    local jobs=($!)
    if [ -n "$docker" ]; then
        track 'base-desktop wheels-desktop' desktop_track &
        jobs+=($!)
        stage base scripts/standin.sh base cpu "$state" "$NARROWGAUGE_TEST_BASE" &
        jobs+=($!)
    fi
    stage wheels scripts/standin.sh wheels cpu "$state/wheels" "$pip_python" || return 1
    track 'lab311-install lab311-kernels lab38-kernels objects' lab_track &
    jobs+=($!)
    # Behind this shell too: while it waits for its jobs, and then alone, it takes signals at once.
    host_track &
    jobs+=($!)
    for job in "${jobs[@]}"; do wait "$job" || failed=yes; done
    [ -z "$failed" ]
}

mkdir -p "$logs" "$reports"
rm -f "$logs"/* "$reports"/* "$stages"
trap 'finish 130' INT TERM
trap 'finish $?' EXIT
begin=$SECONDS
certificate_of_pip
require "$provision" "$docker" "$slow" "$cluster"
new_python=$(newest_python)
pip_python=$(python_with_pip) || finish 1
index_of_pip "$pip_python"
old_python=$(python38)

code=0
main || code=1
printf '\n%d s in all; stages, slowest first:\n' $((SECONDS - begin))
sort -t "$(printf '\t')" -k 2,2nr "$stages" |
    awk -F '\t' '{ printf "  %7.1f s  %s%s\n", $2, $1, ($3 == 0 ? "" : "  FAILED") }'
"$new_python" scripts/summarise.py "$reports" || code=1
finish $code
