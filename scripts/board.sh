# shellcheck shell=sh
# What jetson.sh and desktop.sh share: options, the engine, the data and the container; image.sh has
# the image, facts.sh what the host is like. Each of the two says which target it is, and how this
# host gives a container the GPU. POSIX sh, the docker command and sha256sum; busybox's will do.

: "${root:?the checkout}" "${program:?the script that sources this}"
# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"

# As in src/narrowgauge_contract/errors.py.
usage=2 not_applicable=3 docker_unavailable=10 docker_permission=11 container_refused=15
docker_too_old=16 results_unwritable=23 out_of_memory=31 killed_code=32 interrupted=130
# What is needed of the engine came with this version, whose API is 1.41.
engine_least=20.10

# Where the host's own files are; tests have their own.
system=${NARROWGAUGE_ROOT:-}
target='' accelerator='' image='' load='' build='' dry='' clocks='' gpus=''
results=$root/results
case ${XDG_DATA_HOME:-} in
/*) data=$XDG_DATA_HOME/narrowgauge/data ;;
*) data=$HOME/.local/share/narrowgauge/data ;;
esac

# shellcheck source=scripts/facts.sh
. "$root/scripts/facts.sh"
# shellcheck source=scripts/image.sh
. "$root/scripts/image.sh"

say() { printf '%s\n' "$*" >&2; }

# fail CODE WHAT WHY NEXT: each may span lines; WHY may be empty.
fail() {
    printf '%s: %s\n' "$program" "$2" >&2
    if [ -n "$3" ]; then printf '%s\n' "$3" | sed '/^$/d; 1s/^/why:  /; 2,$s/^/      /' >&2; fi
    printf '%s\n' "$4" | sed '1s/^/next: /; 2,$s/^/      /' >&2
    exit "$1"
}

table() { grep -v '^#' "$root/images/targets.table"; }

# of_target N: the N-th part of this target's line in the table.
of_target() { table | awk -F '|' -v name="$target" -v part="$1" '$1 == name { print $part }'; }

# version_below A B: whether A is an older version than B, part by part as numbers.
version_below() {
    [ "$1" != "$2" ] && awk -v a="$1" -v b="$2" 'BEGIN {
        n = split(a, x, /[^0-9]+/); m = split(b, y, /[^0-9]+/)
        for (i = 1; i <= (n > m ? n : m); i++) {
            if (x[i] + 0 < y[i] + 0) exit 0
            if (x[i] + 0 > y[i] + 0) exit 1
        }
        exit 1
    }'
}

# contains A,B,C WORD
contains() { case ,$1, in *,"$2",*) return 0 ;; esac && return 1; }

machine_architecture() {
    case $(uname -m) in
    x86_64 | amd64) echo amd64 ;;
    aarch64 | arm64) echo arm64 ;;
    *) uname -m ;;
    esac
}

main() {
    parse "$@"
    choose_target
    check_engine
    check_accelerator
    if [ -z "$dry" ]; then prepare_folders; fi
    find_image
    if [ -z "$dry" ]; then fetch_data; fi
    start
}

# Docker would make a folder that is missing as root, and a build is long.
prepare_folders() {
    for folder in "$results" "$data"; do
        probe=$folder/.narrowgauge-$$
        if ! said=$( (mkdir -p "$folder" && : >"$probe") 2>&1); then
            fail $results_unwritable "cannot write to $folder" "$said" \
                'make it writable for your user, or name another: --results DIR, --data DIR'
        fi
        rm -f "$probe"
    done
    if ! write_env "$root" "$target" "$data"; then say "warning: $root/.env cannot be written"; fi
}

# Sets the options, `experiment`, and `words`: the rest, quoted so that `eval set --` reads it.
parse() {
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help)
            sed -n '2,/^set -eu/{/^#/s/^# \{0,1\}//p;}' "$root/scripts/$program"
            exit 0
            ;;
        --build) build=yes ;;
        --dry-run) dry=yes ;;
        --image=* | --load=* | --data=* | --results=*) option "${1%%=*}" "${1#*=}" ;;
        --image | --load | --data | --results)
            option "$1" "${2-}"
            shift
            ;;
        *) break ;;
        esac
        shift
    done
    if [ -n "$build" ] && [ -n "$image$load" ]; then
        fail $usage '--build goes with neither --image nor --load' '' "./scripts/$program --help"
    fi
    experiment=mnist
    case ${1-} in
    '' | -*) ;;
    *)
        experiment=$1
        shift
        ;;
    esac
    case $experiment in */* | .*) known='' ;; *) known=$root/experiments/$experiment/experiment.toml ;; esac
    if [ ! -f "$known" ]; then
        fail $usage "there is no experiment '$experiment'" '' \
            "one of: $(cd "$root/experiments" && printf '%s ' */experiment.toml | sed 's|/experiment.toml||g')"
    fi
    for word; do
        case $word in
        --build | --dry-run | --image | --image=* | --load | --load=* | --data | --data=* | --results | --results=*)
            fail $usage "${word%%=*} comes before the experiment" \
                'what follows the experiment goes to the lab' "./scripts/$program ${word%%=*} … $experiment"
            ;;
        --out | --out=* | --job | --job=* | --experiments | --experiments=* | --host-facts | --host-facts=*)
            fail $usage "${word%%=*} is this script's own to give to the lab" '' "./scripts/$program --help"
            ;;
        esac
    done
    words=$(quote "$@")
}

# option NAME VALUE
option() {
    if [ -z "$2" ]; then fail $usage "$1 needs a value" '' "./scripts/$program --help"; fi
    case $1 in
    --image) image=$2 ;;
    --load) load=$2 ;;
    --data) data=$(absolute "$2") ;;
    --results) results=$(absolute "$2") ;;
    esac
}

absolute() {
    case $1 in
    /*) printf '%s\n' "$1" ;;
    *) printf '%s/%s\n' "$(pwd)" "$1" ;;
    esac
}

# quote WORD...: the words for `eval`, or for a person's shell.
quote() {
    for word; do
        case $word in
        '' | *[!A-Za-z0-9_.,:=@/+-]*)
            printf "'%s' " "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")"
            ;;
        *) printf '%s ' "$word" ;;
        esac
    done
}

# Sets engine_version, engine_runtimes, engine_default_runtime, engine_folder, engine_cdi.
check_engine() {
    if ! command -v docker >/dev/null 2>&1; then
        fail $docker_unavailable 'there is no docker command here' '' \
            'sudo apt-get install docker.io, then log in again'
    fi
    # Warnings go to its standard error, of a config.json that is not ours to read for one.
    said=$(docker info --format \
        '{{.ServerVersion}}|{{range $name, $_ := .Runtimes}}{{$name}} {{end}}|{{.DefaultRuntime}}|{{.DockerRootDir}}|{{json .}}' \
        2>/dev/null) || said=''
    engine_version=$(field 1 "$said")
    if [ -z "$engine_version" ]; then no_engine; fi
    engine_runtimes=$(field 2 "$said")
    engine_default_runtime=$(field 3 "$said")
    engine_folder=$(field 4 "$said")
    # Docker 25 and newer name these folders where CDI is switched on; older ones cannot do it.
    case $said in *'"CDISpecDirs":["'*) engine_cdi=yes ;; *) engine_cdi='' ;; esac
    if version_below "$engine_version" $engine_least; then
        fail $docker_too_old "Docker $engine_version is too old" \
            "Docker $engine_least (API 1.41) or newer is needed" \
            'sudo apt-get update && sudo apt-get install docker.io'
    fi
}

# Why no engine answers. `info` of Docker 20.10 does not say it.
no_engine() {
    said=$(docker ps 2>&1) || true
    case $said in
    *'permission denied while trying to connect'*)
        fail $docker_permission 'the Docker engine does not let you in' "$said" \
            "sudo usermod -aG docker $(id -un), then log in again"
        ;;
    esac
    fail $docker_unavailable 'no Docker engine answers' "$said" 'sudo systemctl start docker'
}

# field N TEXT: the N-th part of a line parted by `|`.
field() { printf '%s\n' "$2" | tail -n 1 | cut -d '|' -f "$1"; }

# The data sets that the run reads: what its parameter says, else what the profile says of that
# parameter, else its default.
data_sets() {
    file=$root/experiments/$experiment/experiment.toml
    parameter=$(toml_text "$file" data parameter)
    toml_list "$file" data sets
    if [ -z "$parameter" ]; then return 0; fi
    profile=short chosen='' before=''
    eval "set -- $words"
    for word; do
        case $word in
        "$parameter="* | "-p$parameter="*) chosen=${word#*=} ;;
        "--parameter=$parameter="*) chosen=${word#*=*=} ;;
        --profile=*) profile=${word#*=} ;;
        esac
        if [ "$before" = --profile ]; then profile=$word; fi
        before=$word
    done
    chosen=${chosen:-$(toml_text "$file" "profiles.$profile" "$parameter")}
    chosen=${chosen:-$(toml_text "$file" "parameters.$parameter" default)}
    printf '%s\n' "$chosen" | tr ',' '\n' | grep -v '^synthetic$' || true
}

# toml_text FILE TABLE KEY: a text between quotes, of `[TABLE]`.
toml_text() { sed -n "/^\\[$2\\]/,/^\\[/s/^$3 *= *\"\\([^\"]*\\)\".*/\\1/p" "$1"; }
toml_list() { sed -n "/^\\[$2\\]/,/^\\[/s/^$3 *= *\\[\\(.*\\)\\].*/\\1/p" "$1" | tr -d '" ' | tr ',' '\n'; }

fetch_data() {
    for name in $(data_sets); do
        if [ -f "$data/$name/verified.json" ]; then continue; fi
        say "fetching $name into $data"
        set --
        for variable in HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy npm_config_registry; do
            set -- "$@" --env "$variable"
        done
        docker run --rm --user "$(id -u):$(id -g)" --init --read-only --cap-drop ALL \
            --security-opt no-new-privileges --tmpfs /tmp:rw,exec,nosuid,nodev,mode=1777 \
            --env HOME=/tmp "$@" --mount "$(bind "$data" /data)" "$image" fetch "$name" >&2 || {
            code=$?
            case $code in 125 | 126 | 127) code=$container_refused ;; esac
            fail "$code" "$name could not be fetched" 'it says why above' \
                "put it into $data, or try made-up data: ./scripts/$program $experiment -p data=synthetic"
        }
    done
}

# bind SOURCE TARGET [readonly]: one --mount. It is a line of CSV, so a comma or quote is quoted.
bind() {
    case $1 in
    *[,\"]*) printf 'type=bind,"source=%s",target=%s' "$(printf '%s' "$1" | sed 's/"/""/g')" "$2" ;;
    *) printf 'type=bind,source=%s,target=%s' "$1" "$2" ;;
    esac
    printf '%s\n' "${3:+,$3}"
}

accelerator_words() {
    case $accelerator in
    device-request) echo '--gpus all' ;;
    cdi) echo '--device nvidia.com/gpu=all' ;;
    nvidia-runtime) echo '--runtime nvidia' ;;
    esac
}

read_only_root() { of_target 9; }

# The words of the container, quoted. The same as src/narrowgauge/container.py gives a run's; a test
# compares them.
container_words() {
    set -- run --name "$container" --label "io.narrowgauge.run=$container" \
        --label "io.narrowgauge.experiment=$experiment" --label "io.narrowgauge.folder=$results" \
        --user "$(id -u):$(id -g)"
    for group in $(device_groups); do set -- "$@" --group-add "$group"; done
    set -- "$@" --init
    if [ "$(read_only_root)" != false ]; then set -- "$@" --read-only; fi
    set -- "$@" --cap-drop ALL --security-opt no-new-privileges --network none \
        --shm-size 1073741824 --log-driver json-file --log-opt max-size=10m --log-opt max-file=2
    # shellcheck disable=SC2046 # two words
    set -- "$@" $(accelerator_words)
    set -- "$@" --tmpfs /tmp:rw,exec,nosuid,nodev,mode=1777 \
        --mount "$(bind "$facts" /host.json readonly)" --mount "$(bind "$results" /results)" \
        --mount "$(bind "$root/experiments" /experiments readonly)" \
        --mount "$(bind "$data" /data readonly)" --mount "type=volume,source=$cache,target=/cache" \
        --env HOME=/cache --env LOGNAME=narrowgauge --env USER=narrowgauge
    if [ "$accelerator" = nvidia-runtime ]; then
        set -- "$@" --env NVIDIA_DRIVER_CAPABILITIES=compute,utility --env NVIDIA_VISIBLE_DEVICES=all
    fi
    quote "$@" "$image"
}

start() {
    said=$(docker image inspect --format "$(image_template)" "$image" 2>/dev/null) || said=''
    container=narrowgauge-$experiment-$(date -u +%Y%m%dT%H%M%SZ)-$$
    # One that is not there has the tag that it will be built with.
    if [ -n "$said" ]; then tag=$(field 5 "$said"); fi
    tag=${tag:-$(field 1 "$said")}
    cache=narrowgauge-cache-$target-$(printf '%s' "${tag##*:}" | cut -c 1-12)-$(id -u)
    facts=$(mktemp "${TMPDIR:-/tmp}/narrowgauge-host.XXXXXX")
    trap 'rm -f "$facts"' EXIT
    host_facts "$said" >"$facts"
    chmod 644 "$facts"
    eval "set -- $(container_words) run $experiment --experiments /experiments --data /data \
        --results /results --host-facts /host.json $words"
    if [ -n "$dry" ]; then
        trap - EXIT # the line mounts the file
        printf 'docker %s\n' "$(quote "$@")"
        return 0
    fi
    say "running $experiment in $image"
    before=$(runs_there)
    finish "$@"
}

# Too early for a container to be there, the client is what has to be stopped, once it is there.
stop_run() {
    if docker stop -t 30 "$container" >/dev/null 2>&1 || [ -z "$client" ]; then return 0; fi
    kill "$client" 2>/dev/null || :
}

# Runs the container to its end, whatever ends it; then takes care that there is a record.
finish() {
    # In the background, so that a signal to this script is heard at once. The client would pass on a
    # terminal's Ctrl-C too, and a second signal tells the lab not to end in order.
    shift 3
    stopped='' client=''
    # Before there is a client: a signal right after its start would end this script alone.
    trap 'stopped=yes; stop_run' INT TERM HUP
    docker run --name "$container" --sig-proxy=false "$@" </dev/null &
    client=$!
    if [ -n "$stopped" ]; then stop_run; fi
    code=0
    wait "$client" || code=$?
    if [ -n "$stopped" ]; then
        code=0
        wait "$client" || code=$?
    fi
    trap - INT TERM HUP
    killed=$(docker inspect --format '{{.State.OOMKilled}}' "$container" 2>/dev/null) || killed=''
    folder=$(new_folder)
    docker rm --force "$container" >/dev/null 2>&1 || true
    if [ -n "$folder" ] && [ ! -f "$folder/record.json" ]; then save_record; fi
    if [ -n "$folder" ]; then say "results: $folder"; fi
    case $code in
    125 | 126 | 127) fail $container_refused 'docker could not start the container' 'it says why above' \
        'where Python 3.10 is: ./scripts/run.sh, then .venv/bin/narrowgauge doctor tells what is missing' ;;
    esac
    if ran_out_of_memory; then
        fail $out_of_memory 'the run was killed: no memory was left' '' \
            'fewer images at once: -p batch=16; or more swap'
    fi
    # 128 and a signal's number is what docker gives; the lab ends interrupted by itself.
    if [ "$code" -gt 128 ] && [ "$code" != $interrupted ]; then
        if [ -n "$stopped" ]; then code=$interrupted; else code=$killed_code; fi
    fi
    exit "$code"
}

# The run's folder, whose name the lab chose: what it said last, else one that was not there before,
# with a record unless the lab was killed. Another run may have begun meanwhile.
new_folder() {
    name=$(docker logs --tail 1 "$container" 2>/dev/null | sed -n "s|^in /results/$experiment/||p")
    recorded='' unrecorded=''
    for other in $(runs_there); do
        case " $before " in *" $other "*) continue ;; esac
        if [ -f "$results/$experiment/$other/record.json" ]; then recorded=$other; else unrecorded=$other; fi
    done
    if [ "$code" -gt 128 ]; then
        name=${name:-${unrecorded:-$recorded}}
    else
        name=${name:-${recorded:-$unrecorded}}
    fi
    if [ -n "$name" ]; then printf '%s\n' "$results/$experiment/$name"; fi
}

runs_there() (
    cd "$results/$experiment" 2>/dev/null || exit 0
    for name in *; do
        if [ -d "$name" ]; then printf '%s ' "$name"; fi
    done
)

# The engine says so of any process of the container; the lab outlives a row that was killed.
ran_out_of_memory() { [ "$killed" = true ] && [ "$code" = 137 ]; }

# A lab that was killed wrote no record; what it measured is in its events.
save_record() {
    memory=''
    if ran_out_of_memory; then memory=--out-of-memory; fi
    docker run --rm --user "$(id -u):$(id -g)" --read-only --cap-drop ALL --network none \
        --security-opt no-new-privileges --tmpfs /tmp:rw,exec,nosuid,nodev,mode=1777 \
        --tmpfs /cache:exec,mode=1777 --mount "$(bind "$results" /results)" \
        --mount "$(bind "$facts" /host.json readonly)" "$image" \
        record --out "/results/$experiment/$(basename "$folder")" --host-facts /host.json \
        ${memory:+"$memory"} >&2 ||
        say "warning: no record could be made of $folder; its events are there"
}
