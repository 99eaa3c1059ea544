# shellcheck shell=bash
# What the suite needs of a machine: found, listed, or installed. Sourced by test.sh.
# Nothing here touches a Docker engine that already answers.

: "${state:?the folder that everything is kept in}" "${logs:?the folder of the stages}"
engine_folder=''

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

newest_python() {
    local name
    for name in python3.11 python3.13 python3.12 python3.10 python3; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' \
            2>/dev/null; then
            command -v "$name"
            return 0
        fi
    done
    return 1
}

python38() {
    local name
    for name in python3.8 "$HOME"/.pyenv/versions/3.8*/bin/python "$state"/uv-python/*/bin/python3.8 \
        "$(uv python find 3.8 2>/dev/null)"; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 8))' \
            2>/dev/null; then
            command -v "$name"
            return 0
        fi
    done
    return 1
}

engine_answers() { docker info >/dev/null 2>&1; }

compose_answers() { docker compose version >/dev/null 2>&1; }

#: buildx, or a client old enough to ask the engine's own BuildKit.
can_build() {
    local client
    docker buildx version >/dev/null 2>&1 && return 0
    for client in $(type -ap docker); do
        case $("$client" --version) in
        *" version "1[0-9].* | *" version "2[0-2].*) return 0 ;;
        esac
    done
    return 1
}

can_emulate() { [ "$(uname -m)" = aarch64 ] || [ -f /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; }

slurm_is_there() {
    local name
    for name in slurmctld slurmd munged sbatch; do
        PATH=$PATH:/usr/sbin:/sbin command -v $name >/dev/null || return 1
    done
}

#: Prints one line for each thing that is missing: its name, a tab, and what installs it.
list_missing() {
    local docker=$1 slow=$2 cluster=$3
    newest_python >/dev/null ||
        printf 'python\tapt-get install python3 python3-venv   (3.10 or newer)\n'
    python38 >/dev/null ||
        printf 'python3.8\tuv python install 3.8, or pyenv install 3.8\n'
    command -v g++ >/dev/null || printf 'g++\tapt-get install g++\n'
    command -v busybox >/dev/null || printf 'busybox\tapt-get install busybox\n'
    command -v git >/dev/null || printf 'git\tapt-get install git\n'
    command -v chromium >/dev/null || command -v google-chrome >/dev/null ||
        printf 'chromium\tapt-get install chromium, or google-chrome where that is a snap\n'
    [ -z "$cluster" ] || slurm_is_there ||
        printf 'slurm\tapt-get install slurm-wlm munge\n'
    [ -n "$docker" ] || return 0
    engine_answers ||
        printf 'engine\tapt-get install docker.io, and start it: systemctl start docker\n'
    compose_answers ||
        printf 'compose\tapt-get install docker-compose-v2, or docker-compose of Debian 13\n'
    can_build || printf 'buildx\tapt-get install docker-buildx\n'
    PATH=$PATH:/usr/sbin command -v sshd >/dev/null ||
        printf 'sshd\tapt-get install openssh-server   (not started by this)\n'
    command -v debootstrap >/dev/null || docker image inspect "$NARROWGAUGE_TEST_BASE" \
        >/dev/null 2>&1 || printf 'debootstrap\tapt-get install debootstrap\n'
    [ -n "$slow" ] || return 0
    can_emulate || printf 'emulation\tapt-get install qemu-user-static binfmt-support\n'
}

#: GB that the suite takes at most, with what an earlier run of it has left.
needed_gb() {
    local docker=$1 slow=$2 gb=6
    # An engine that is there has its data on a disk of its own choice.
    if [ -n "$docker" ] && ! engine_answers; then gb=$((gb + 10)); fi
    if [ -n "$slow" ]; then gb=$((gb + 12)); fi
    echo $gb
}

#: require_room DOCKER SLOW: a disk that fills halfway fails tests that have no fault.
require_room() {
    local needed kept free
    needed=$(needed_gb "$@")
    # What an engine of ours has there is root's.
    kept=$({ if [ -d "$state/docker" ]; then as_root du -sk "$state"; else du -sk "$state"; fi; } |
        awk '{ printf "%d", $1 / 1e6 }')
    free=$(df -Pk "$state" | awk 'NR == 2 { printf "%d", $4 / 1e6 }')
    if [ $((free + kept)) -ge "$needed" ]; then return 0; fi
    echo "The suite needs $needed GB in $state: $free GB are free and $kept GB its own."
    echo 'next: free some, or let it keep its things elsewhere: NARROWGAUGE_TEST_STATE=/elsewhere/test'
    exit 14
}

#: require PROVISION DOCKER SLOW CLUSTER: returns when everything is there, else exits with the list.
require() {
    local provision=$1 docker=$2 slow=$3 cluster=$4 missing answer
    use_own_plugins
    require_room "$docker" "$slow"
    missing=$(list_missing "$docker" "$slow" "$cluster")
    [ -n "$missing" ] || return 0
    if [ -z "$provision" ]; then
        show_missing "$missing"
        if [ ! -t 0 ]; then
            echo 'next: install them, or let this do it: ./scripts/test.sh --provision'
            exit 14
        fi
        read -r -p 'Install and start them now? [y/N] ' answer
        case $answer in [yY]*) ;; *) exit 14 ;; esac
    fi
    provide "$missing"
    missing=$(list_missing "$docker" "$slow" "$cluster")
    [ -n "$missing" ] || return 0
    show_missing "$missing"
    exit 14
}

show_missing() {
    echo 'The suite needs what is not here:'
    printf '%s\n' "$1" | awk -F '\t' '{ printf "  %-12s %s\n", $1, $2 }'
}

provide() {
    local name
    while IFS=$'\t' read -r name _; do
        stage "provide-$name" "provide_$name" || true
    done <<<"$1"
    # The engine outlives its stage, so it is started by this shell.
    case $1 in *engine*) engine_answers || start_engine ;; esac
}

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes "$@"
}

provide_python() { apt_install python3 python3-venv; }
provide_g++() { apt_install g++; }
provide_slurm() { apt_install --no-install-recommends slurm-wlm munge; }
provide_git() { apt_install git; }
provide_chromium() { apt_install --no-install-recommends chromium fonts-dejavu-core; }
provide_busybox() { apt_install busybox; }
provide_debootstrap() { apt_install debootstrap debian-archive-keyring; }
provide_sshd() { apt_install openssh-server; }
provide_engine() { command -v dockerd >/dev/null || apt_install docker.io; }
provide_compose() { plugin compose docker-compose-v2 docker-compose-plugin docker-compose; }
provide_buildx() { plugin buildx docker-buildx docker-buildx-plugin docker-buildx; }

#: A machine without systemd mounts and enables nothing by itself.
provide_emulation() {
    apt_install qemu-user-static binfmt-support || return 1
    if [ ! -e /proc/sys/fs/binfmt_misc/register ]; then
        as_root mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc || return 1
    fi
    can_emulate || as_root update-binfmts --enable qemu-aarch64
}

provide_python3.8() {
    provide_uv && UV_PYTHON_INSTALL_DIR=$state/uv-python "$(own_uv)" python install 3.8
}

#: The machine's uv, else the suite's own.
own_uv() { command -v uv || printf '%s\n' "$state/uv/bin/uv"; }

provide_uv() {
    "$(own_uv)" --version 2>/dev/null && return 0
    "$(newest_python)" -m venv --clear "$state/uv" &&
        "$state/uv/bin/pip" install --quiet --disable-pip-version-check uv
}

#: uv reads none of pip's settings: what a proxy signs with, and where packages come from, it is told.
certificate_of_pip() {
    if [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}; fi
}

#: index_of_pip PYTHON: one that has pip.
index_of_pip() {
    local index=${PIP_INDEX_URL:-}
    [ -n "$index" ] || index=$("$1" -m pip config get global.index-url 2>/dev/null)
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
}

#: An engine of our own, with its own data and socket; only where none answers.
start_engine() {
    if docker info 2>&1 | grep -qi 'permission denied'; then
        echo "an engine is there, and you may not use it: sudo usermod -aG docker $USER, log in again"
        return 1
    fi
    # The path of a socket may not exceed 107 characters, so it does not lie in the checkout.
    engine_folder=$(mktemp -d /tmp/narrowgauge-engine.XXXXXX)
    export DOCKER_HOST=unix://$engine_folder/docker.sock
    as_root dockerd --data-root "$state/docker" --exec-root "$engine_folder/exec" \
        --pidfile "$engine_folder/pid" --host "$DOCKER_HOST" --group "$(id -gn)" \
        >"$logs/dockerd.log" 2>&1 &
    # Not one of this shell's jobs any more: stop_engine ends it, after everything that uses it.
    disown
    local left=120
    until engine_answers; do
        left=$((left - 1))
        [ $left -gt 0 ] || { tail -n 20 "$logs/dockerd.log"; return 1; }
        sleep 0.25
    done
    echo "started a Docker engine of our own: $DOCKER_HOST"
}

stop_engine() {
    [ -n "$engine_folder" ] || return 0
    local pid
    local left=600
    pid=$(cat "$engine_folder/pid" 2>/dev/null) && as_root kill "$pid"
    while [ -n "$pid" ] && as_root kill -0 "$pid" 2>/dev/null; do
        left=$((left - 1))
        # One without room on its disk may never end by itself.
        [ $left -gt 0 ] || as_root kill -KILL "$pid" 2>/dev/null
        sleep 0.1
    done
    as_root rm -rf "$engine_folder"
    engine_folder=''
}

#: plugin NAME PACKAGE...: a client plugin for the suite alone, not installed on the machine.
#: The last package is looked for in Debian 13, where it needs no newer C library than Debian 12's.
plugin() (
    name=$1 folder=$state/plugin-$1
    shift
    rm -rf "$folder" && mkdir -p "$folder/lists/partial" "$folder/archives/partial" || return 1
    cd "$folder" || return 1
    for package in "${@:1:$#-1}"; do
        if apt-cache show "$package" >/dev/null 2>&1 && apt-get download "$package"; then break; fi
    done
    if ! compgen -G '*.deb' >/dev/null; then
        mirror=$(debian_mirror)
        if [ -z "$mirror" ]; then
            echo "none of ${*:1:$#-1} is to be had, and apt here is not set to a mirror of Debian"
            return 1
        fi
        echo "deb $mirror trixie main" >sources.list
        options=(-o "Dir::Etc::sourcelist=$folder/sources.list" -o Dir::Etc::sourceparts=-
            -o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder")
        apt-get "${options[@]}" update -qq &&
            apt-get "${options[@]}" download "${!#}" || return 1
    fi
    for package in *.deb; do dpkg-deb -x "$package" tree || return 1; done
    found=$(find tree -path "*/cli-plugins/docker-$name" | head -n 1)
    mkdir -p "$state/docker-config/cli-plugins"
    cp "$found" "$state/docker-config/cli-plugins/"
)

#: The mirror that apt is set to, where it is Debian's; else nothing.
debian_mirror() {
    apt-get indextargets --format "\$(REPO_URI) \$(RELEASE) \$(COMPONENT)" \
        'Created-By: Packages' 2>/dev/null | awk '$2 == "bookworm" && $3 == "main" { print $1; exit }'
}

#: Plugins that an earlier run provided count as there; the user's own settings still hold.
use_own_plugins() {
    if compose_answers && can_build; then return 0; fi
    local own=${DOCKER_CONFIG:-$HOME/.docker}
    mkdir -p "$state/docker-config/cli-plugins"
    for name in config.json contexts; do
        if [ -e "$own/$name" ]; then cp -r "$own/$name" "$state/docker-config/"; fi
    done
    export DOCKER_CONFIG=$state/docker-config
}
