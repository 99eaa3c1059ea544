#!/bin/sh
# What a container does, in words:
#   (nothing)                        runs mnist
#   resnet -p batch=32               runs an experiment
#   run …, facts, record …           the lab's own commands (python3 -m narrowgauge_lab)
#   fetch mnist                      puts data sets into /data
#   bash, python3 …, jupyter lab     any program of the image
# An option alone is one of mnist's: -p epochs=1
# POSIX sh; needs no network and writes nothing but an empty file in the results, to see if it may.
set -eu

# As in src/narrowgauge_contract/errors.py.
data_unavailable=20
results_unwritable=23

user=$(id -u):$(id -g)

# fail CODE WHAT WHY NEXT: each may span lines.
fail() {
    code=$1
    {
        printf 'error: %s\n' "$2"
        printf '%s\n' "$3" | sed '1s/^/  why:  /; 2,$s/^/        /'
        printf '%s\n' "$4" | sed '1s/^/  next: /; 2,$s/^/        /'
    } >&2
    exit "$code"
}

# The folder itself, or the nearest one above it that is there.
existing() {
    folder=$1
    while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
    printf '%s\n' "$folder"
}

# Prints why nothing can be written to a folder; nothing where it can. `test -w` does not know of
# read-only mounts and dropped capabilities.
unwritable() {
    if [ ! -d "$1" ]; then echo 'it is not a folder' && return; fi
    probe=$1/.narrowgauge-$$
    reason=$( (: >"$probe") 2>&1 ) && rm -f "$probe" && return
    printf '%s\n' "${reason##*: }"
}

# What `ls` says of a folder: mode links uid gid.
owner() {
    # shellcheck disable=SC2046 # words are wanted
    set -- $(ls -ldn "$1")
    printf '%s:%s %s\n' "$3" "$4" "$1"
}

# Whether uids are the host's own: not under rootless Docker, nor where the daemon remaps them.
# unverified: the lines for .env under rootless Docker | only an engine run by root was at hand | with rootless Docker: docker compose run --rm cpu-train -p data=synthetic
true_uids() { awk '{ exit !($1 == 0 && $2 == 0 && $3 >= 65536) }' /proc/self/uid_map; }

# run_as UID:GID
run_as() {
    printf '%s\n' 'let the container run as its owner: add these lines to .env, beside compose.yaml' \
        "NARROWGAUGE_UID=${1%:*}" "NARROWGAUGE_GID=${1#*:}"
}

# advise UID:GID NAME: how to make a folder of that owner one to write to. NAME is the host's for it.
advise() {
    if [ "$1" = 0:0 ] && true_uids; then
        printf '%s\n' 'Docker makes a folder that is missing as root. In the checkout:' \
            "sudo chown \"\$(id -u):\$(id -g)\" $2" \
            "printf 'NARROWGAUGE_UID=%s\\nNARROWGAUGE_GID=%s\\n' \"\$(id -u)\" \"\$(id -g)\" >>.env"
    elif [ "${1%:*}" = "${user%:*}" ]; then
        printf '%s\n' "chmod u+rwx $2"
    else
        run_as "$1"
    fi
}

# check_writable FOLDER NAME OPTION
check_writable() {
    place=$(existing "$1")
    reason=$(unwritable "$place")
    case $reason in
    # The lab says best what a full disk means for a run.
    '' | 'No space left on device' | 'Disk quota exceeded') return 0 ;;
    'Read-only file system')
        fail $results_unwritable "cannot write to $place" 'it is mounted read-only' \
            "mount a folder of yours there, or name another with $3"
        ;;
    esac
    owned=$(owner "$place")
    fail $results_unwritable "cannot write to $place" \
        "$reason: it belongs to ${owned%% *} (${owned#* }), this container runs as $user" \
        "$(advise "${owned%% *}" "$2")"
}

check_readable() {
    [ -d "$1" ] || return 0 # the lab says what it lacks
    if ls "$1/" >/dev/null 2>&1 && [ -x "$1" ]; then return 0; fi
    owned=$(owner "$1")
    next='let others read the data folder: sudo chmod -R a+rX FOLDER'
    if [ "${owned%% *}" != 0:0 ]; then
        next="$next
or $(run_as "${owned%% *}")"
    fi
    fail $data_unavailable "cannot read the data in $1" \
        "it belongs to ${owned%% *} (${owned#* }), this container runs as $user" "$next"
}

# given OPTION WORD...: the value of the option's last occurrence, as `--out X` or `--out=X`.
given() {
    option=$1 value='' next=
    shift
    for word; do
        if [ -n "$next" ]; then value=$word next=; continue; fi
        case $word in
        "$option") next=yes ;;
        "$option="*) value=${word#*=} ;;
        esac
    done
    printf '%s\n' "$value"
}

# Whether the image has a program of that name; what the shell alone knows is none.
program() {
    case $1 in
    */*) [ -f "$1" ] && [ -x "$1" ] && return 0 || return 1 ;;
    esac
    (
        IFS=:
        for folder in $PATH; do
            if [ -f "$folder/$1" ] && [ -x "$folder/$1" ]; then exit 0; fi
        done
        exit 1
    )
}

run() {
    out=$(given --out "$@")
    out=${out:-$(given --results "$@")}
    data=$(given --data "$@")
    if [ -n "$out" ]; then check_writable "$out" results --out; fi
    if [ -n "$data" ]; then check_readable "$data"; fi
    exec python3 -m narrowgauge_lab run "$@"
}

experiment() {
    case ${1-} in
    '' | -*) name=mnist ;;
    *)
        name=$1
        shift
        ;;
    esac
    # Before the user's own words, which so win.
    set -- --experiments /experiments --data /data "$@"
    if [ -z "$(given --out "$@")$(given --results "$@")" ]; then set -- --results /results "$@"; fi
    run "$name" "$@"
}

fetch() {
    data=$(given --data "$@")
    data=${data:-/data}
    for word; do
        if [ "$word" = --if-possible ] && [ -n "$(unwritable "$(existing "$data")")" ]; then
            echo "$data is not writable for $user: nothing is fetched" >&2
            exit 0
        fi
    done
    check_writable "$data" 'the data folder' --data
    exec python3 -m narrowgauge_data fetch --data /data "$@"
}

case ${1-} in
run)
    shift
    run "$@"
    ;;
facts | record) exec python3 -m narrowgauge_lab "$@" ;;
fetch)
    shift
    # Compose's data-fetch says it already, so that a set's name alone will do.
    if [ "${1-}" = fetch ]; then shift; fi
    fetch "$@"
    ;;
'' | -*) experiment "$@" ;;
*)
    if [ ! -d "/experiments/$1" ] && program "$1"; then exec "$@"; fi
    experiment "$@"
    ;;
esac
