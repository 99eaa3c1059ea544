#!/usr/bin/env bash
# Makes what the container tests build on where no image registry can be reached:
#   scripts/standin.sh base TARGET DIR IMAGE      a base for TARGET, in the engine
#   scripts/standin.sh wheels TARGET DIR PYTHON   every wheel of its lock, and torch, in DIR
#   scripts/standin.sh objects TARGET DIR IMAGE   kernels compiled here below DIR, for image builds
# cpu: Debian 12 with its Python 3.11. desktop: the same with Python 3.8 before it (PYTHON38 names
# one of this host). jetson: Debian 11 for arm64 with torch 1.8.0, by emulation; takes minutes.
# What is there already is kept. Compiled files go by their content, compiler and flags, so a build
# takes only those that it would have made. `base` needs root for debootstrap, and for jetson a PYTHON with pip.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cpu_index=https://download.pytorch.org/whl/cpu
#: A base of Jetson brings its own torch; this one's is the newest for Python 3.9 with old headers.
jetson_packages='torch==1.8.0 numpy==1.26.4 typing-extensions==4.12.2 pillow==10.4.0'

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# The mirror that apt is set to, when it has this release; else nothing: debootstrap has its own.
mirror() {
    apt-get indextargets --format "\$(REPO_URI) \$(RELEASE) \$(COMPONENT)" \
        'Created-By: Packages' 2>/dev/null |
        awk -v release=bookworm '$2 == release && $3 == "main" { print $1; exit }'
}

#: system FOLDER RELEASE ARCHITECTURE: a tar of a small Debian with a compiler and Python's headers.
system() {
    local tar=$1/base-$2-$3.tar from tree
    if [ -f "$tar" ]; then return 0; fi
    mkdir -p "$1"
    tree=$(mktemp -d "${TMPDIR:-/tmp}/narrowgauge-base.XXXXXX")
    # shellcheck disable=SC2064 # the folder is known now
    trap "as_root rm -rf '$tree'" EXIT
    from=$(mirror)
    as_root debootstrap --variant=minbase --arch="$3" \
        --include=ca-certificates,g++,python3,python3-dev,python3-pip,python3-venv \
        "$2" "$tree" ${from:+"$from"} >&2
    as_root rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
    as_root tar -C "$tree" -c . >"$tar.part"
    mv "$tar.part" "$tar"
}

#: A client that has BuildKit: what it builds may be for another machine, which import cannot say.
build() {
    if docker buildx version >/dev/null 2>&1; then
        docker buildx build --load "$@"
    else
        local client
        for client in $(type -ap docker); do
            case $("$client" --version) in
            *" version "1[0-9].* | *" version "2[0-2].*)
                DOCKER_BUILDKIT=1 "$client" build "$@"
                return
                ;;
            esac
        done
        echo 'no docker command here can build with BuildKit' >&2
        return 14
    fi
}

base_cpu() {
    system "$1" bookworm "$(dpkg --print-architecture)"
    docker import "$1/base-bookworm-$(dpkg --print-architecture).tar" "$2"
}

base_desktop() {
    local python=${PYTHON38:-python3.8} prefix context=$1/desktop
    system "$1" bookworm "$(dpkg --print-architecture)"
    prefix=$("$python" -c 'import sys; assert sys.version_info[:2] == (3, 8); print(sys.base_prefix)')
    rm -rf "$context"
    mkdir -p "$context"
    ln "$1/base-bookworm-$(dpkg --print-architecture).tar" "$context/base.tar"
    # Not where it lies here: other users than root must reach it inside.
    tar -C "$prefix" -c --exclude=__pycache__ --exclude=site-packages --exclude=test . >"$context/python.tar"
    cat >"$context/Dockerfile" <<'EOF'
FROM scratch
ADD base.tar /
ADD python.tar /opt/python3.8
ENV PATH=/opt/python3.8/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN mkdir -p /opt/python3.8/lib/python3.8/site-packages \
 && echo /opt/python3.8/lib >/etc/ld.so.conf.d/python3.8.conf && ldconfig
EOF
    build --tag "$2" "$context"
    rm -rf "$context"
}

base_jetson() {
    local context=$1/jetson
    system "$1" bullseye arm64
    mkdir -p "$context/wheels"
    # shellcheck disable=SC2086 # one word per package
    "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --dest "$context/wheels" --no-deps \
        --only-binary=:all: --python-version 3.9 --implementation cp \
        --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 --platform any \
        $jetson_packages
    ln -f "$1/base-bullseye-arm64.tar" "$context/base.tar"
    cat >"$context/Dockerfile" <<EOF
FROM scratch
ADD base.tar /
RUN --mount=type=bind,source=wheels,target=/wheels \\
    python3 -m pip install --no-index --find-links /wheels --no-deps $jetson_packages
EOF
    build --platform linux/arm64 --tag "$2" "$context"
}

make_base() {
    local target=$1 folder=$2 image=$3
    if docker image inspect "$image" >/dev/null 2>&1; then return 0; fi
    "base_$target" "$folder" "$image"
}

#: setting TARGET TABLE KEY: a text of docker/targets.toml.
setting() {
    sed -n "/^\\[$1$2\\]/,/^\\[/s/^$3 = \"\\(.*\\)\"/\\1/p" "$root/docker/targets.toml"
}

make_wheels() {
    local target=$1 folder=$2 python=$3 lock=$root/docker/locks/$1.txt torch machine options
    # Other builds of torch have other local parts.
    torch=$(setting "$target" .torch version)
    torch=${torch%%+*}
    machine=$(uname -m)
    if [ "$target" = jetson ]; then machine=aarch64; fi
    options=(--quiet --disable-pip-version-check --no-deps --dest "$folder" --only-binary=:all:
        --python-version "$(setting "$target" '' python)" --implementation cp
        --platform "manylinux_2_28_$machine" --platform "manylinux_2_27_$machine"
        --platform "manylinux2014_$machine" --platform "manylinux1_$machine" --platform any)
    if [ -f "$folder/complete-$torch" ] && cmp -s "$lock" "$folder/complete-$torch"; then return 0; fi
    mkdir -p "$folder"
    rm -f "$folder"/*.whl "$folder"/complete-*
    "$python" -m pip download "${options[@]}" --require-hashes -r "$lock"
    if [ -n "$torch" ]; then
        # A build without CUDA where there is one: from its own index, or from where pip looks here.
        "$python" -m pip download "${options[@]}" --retries 1 --index-url $cpu_index "torch==$torch" ||
            "$python" -m pip download "${options[@]}" "torch==$torch"
    fi
    cp "$lock" "$folder/complete-$torch"
}

#: The cache of compiled files that images/*/Dockerfile build with, filled from a build of this host.
fill_objects() {
    local folder=$1 image=$2 context
    context=$(mktemp -d "${TMPDIR:-/tmp}/narrowgauge-objects.XXXXXX")
    # shellcheck disable=SC2064 # the folder is known now
    trap "rm -rf '$context'" EXIT
    find "$folder" -name '*.o' -exec cp -f {} "$context" \;
    cat >"$context/Dockerfile" <<EOF
FROM $image
RUN --mount=type=bind,target=/from --mount=type=cache,id=narrowgauge-objects,target=/objects \\
    cp -n /from/*.o /objects/
EOF
    build --no-cache "$context"
}

usage() {
    sed -n '2,9p' "$0" >&2
    exit 2
}

case ${2:-} in
cpu | desktop | jetson) ;;
*) usage ;;
esac
case $1 in
base) make_base "$2" "$3" "$4" ;;
wheels) make_wheels "$2" "$3" "$4" ;;
objects) fill_objects "$3" "$4" ;;
*) usage ;;
esac
