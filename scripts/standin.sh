#!/usr/bin/env bash
# Makes what the container tests build on where no image registry can be reached:
#   scripts/standin.sh base DIR IMAGE     a Debian 12 base with Python 3.11 and g++, in the engine
#   scripts/standin.sh wheels DIR PYTHON  every wheel of docker/locks/standin.txt, and torch, in DIR
# Both keep what is already there. `base` needs root for debootstrap.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
release=bookworm
python_version=3.11
cpu_index=https://download.pytorch.org/whl/cpu

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# The mirror that apt is set to, when it has this release; else nothing: debootstrap has its own.
mirror() {
    apt-get indextargets --format "\$(REPO_URI) \$(RELEASE) \$(COMPONENT)" \
        'Created-By: Packages' 2>/dev/null |
        awk -v release=$release '$2 == release && $3 == "main" { print $1; exit }'
}

make_base() {
    local folder=$1 image=$2 tree
    if docker image inspect "$image" >/dev/null 2>&1; then return 0; fi
    mkdir -p "$folder"
    if [ ! -f "$folder/base.tar" ]; then
        tree=$(mktemp -d "${TMPDIR:-/tmp}/narrowgauge-base.XXXXXX")
        # shellcheck disable=SC2064 # the folder is known now
        trap "as_root rm -rf '$tree'" EXIT
        local from
        from=$(mirror)
        as_root debootstrap --variant=minbase --include=g++,python3,python3-venv \
            $release "$tree" ${from:+"$from"}
        as_root rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
        as_root tar -C "$tree" -c . >"$folder/base.tar.part"
        mv "$folder/base.tar.part" "$folder/base.tar"
    fi
    docker import "$folder/base.tar" "$image"
}

make_wheels() {
    local folder=$1 python=$2 torch machine options
    torch=$(sed -n '/^\[cpu.torch\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$root/docker/targets.toml")
    machine=$(uname -m)
    options=(--quiet --disable-pip-version-check --no-deps --dest "$folder" --only-binary=:all:
        --python-version "$python_version" --implementation cp
        --platform "manylinux_2_28_$machine" --platform "manylinux2014_$machine"
        --platform any)
    if [ -f "$folder/complete-$torch" ] &&
        cmp -s "$root/docker/locks/standin.txt" "$folder/complete-$torch"; then return 0; fi
    mkdir -p "$folder"
    rm -f "$folder"/*.whl "$folder"/complete-*
    "$python" -m pip download "${options[@]}" --require-hashes -r "$root/docker/locks/standin.txt"
    # A build without CUDA: from the index that has it, or from where this machine's pip looks.
    "$python" -m pip download "${options[@]}" --retries 1 --index-url $cpu_index "torch==$torch" ||
        "$python" -m pip download "${options[@]}" "torch==$torch"
    cp "$root/docker/locks/standin.txt" "$folder/complete-$torch"
}

case ${1:-} in
base) make_base "$2" "$3" ;;
wheels) make_wheels "$2" "$3" ;;
*)
    sed -n '2,5p' "$0" >&2
    exit 2
    ;;
esac
