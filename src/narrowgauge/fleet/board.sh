# What a board does for a launcher elsewhere. It is sent with each command and leaves no program there:
#   sh -c "$this" narrowgauge VERB WORD...
# Needed on the board: sh, docker, and Linux's usual coreutils, tar, find and flock.
# Answers are lines `@ng WORD ...`, some followed by as many bytes as they say; between `@ng started`
# and `@ng ended` all other lines are the run's events. `narrowgauge.fleet.protocol` reads them.
# No byte that a run wrote is removed here before the launcher says that it has it.
set -u
export LC_ALL=C
trap '' PIPE HUP
exec 3<&0 </dev/null

say() { printf '@ng %s\n' "$*"; }
# fail KIND TEXT: the end of a command that could not do what it was asked.
fail() {
    say "fail $1 $(printf '%s' "$2" | tr '\n' ' ')"
    exit 0
}
# room TEXT: fails where TEXT is what a full disk says.
room() { case $1 in *'o space left'* | *'quota exceeded'*) fail disk-full "$1" ;; esac; }

# bytes NAME FILE: an answer with the file's content.
bytes() { say "$1 $(stat -c %s "$2")" && cat "$2"; }

facts() {
    say "user $(id -u) $(id -g) $HOME"
    say "machine $(uname -m) $(uname -r) $(nproc)"
    for path in etc/os-release etc/nv_tegra_release proc/cpuinfo proc/meminfo \
        proc/device-tree/compatible proc/device-tree/model \
        sys/devices/system/cpu/cpu0/cpufreq/scaling_governor \
        sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq \
        sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq; do
        [ -r "/$path" ] || continue
        content=$(head -c 4096 "/$path" | tr '\000' '\n')
        say "file ${#content} $path" && printf '%s' "$content"
    done
    for path in /dev/nvmap /dev/nvhost-ctrl /dev/dri/renderD128; do
        [ -e "$path" ] && say "group $(stat -c %g "$path")"
    done
    for tool in docker flock sha256sum tar tail find stat; do
        command -v "$tool" >/dev/null || say "missing $tool"
    done
    # A PC's driver; a Jetson before JetPack 6 has no such program.
    nvidia-smi --query-gpu=compute_cap,driver_version,memory.total,name --format=csv,noheader,nounits \
        2>/dev/null | while IFS= read -r line; do say "gpu $line"; done
    [ ! -r /etc/nv_tegra_release ] || say "power $(nvpmodel -q 2>/dev/null | tr '\n' ' ')"
    engine=$(docker version --format '{{.Server.Version}} {{.Server.APIVersion}}' 2>&1) &&
        say "engine $engine" || say "no-engine $(printf '%s' "$engine" | tr '\n' ' ')"
    say "runtimes $(docker info --format '{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' 2>/dev/null)"
    say "free $(df -Pk "$(existing "$1")" | awk 'NR == 2 { printf "%.0f", $4 * 1024 }')"
}

# existing PATH: the nearest folder that is there.
existing() {
    path=$1
    until [ -d "$path" ]; do path=$(dirname "$path"); done
    printf '%s\n' "$path"
}

# image NAME: all that the engine says of it, on one line.
image() {
    found=$(docker image inspect --format '{{json .}}' "$1" 2>&1) &&
        say "image $found" && return
    case $found in *'o such image'*) say "no-image" ;; *) fail engine "$found" ;; esac
}

# Opening with > would make the file, which the kernel refuses in a sticky folder for another's file.
overwrite() { dd of="$1" conv=nocreat 2>/dev/null; }

lock_file() {
    lock=$leases/narrowgauge.lock
    [ "$1" = all ] || lock=$leases/narrowgauge-$1.lock
    [ -e "$lock" ] || (umask 0 && : >>"$lock") 2>/dev/null || fail lease "cannot make $lock"
}

# Who holds the device of $lock, and the seconds since its launcher was last heard; - for unknown.
held() {
    holder=$(cat "$lock")
    beat=$(printf '%s' "$holder" | sed -n 's/.*"beat": "\([^"]*\)".*/\1/p')
    age=-
    if [ -n "$beat" ] && heard=$(stat -c %Y "$beat" 2>/dev/null); then
        age=$(($(date +%s) - heard))
        [ ! -e "${beat%/*}/launcher-gone" ] || age=gone
    fi
    say "busy $age ${holder:-{\}}"
    exit 0
}

# take DEVICE: the lease, on descriptors 8 (the whole board) and 9. It lasts as long as they are open.
take() {
    lock_file all
    exec 8<"$lock"
    if [ "$1" = all ]; then flock -n 8 || held; else
        flock -n -s 8 || held
        lock_file "$1"
        exec 9<"$lock"
        flock -n 9 || held
    fi
}

# What a holder that did not end in order left behind may still be measuring.
nothing_else_runs() {
    others=$(docker ps --filter label=io.narrowgauge.run \
        --format '{{.Label "io.narrowgauge.run"}} {{.Label "io.narrowgauge.device"}}' 2>&1) ||
        fail engine "$others"
    other=$(printf '%s\n' "$others" | awk -v device="$1" \
        'NF && (device == "all" || NF < 2 || $2 == "all" || $2 == device) { print $1; exit }')
    [ -z "$other" ] || { say "measuring $other" && exit 0; }
}

# Until the launcher is gone: its pulse, and its word that everything has arrived.
listen() {
    while read -r word; do
        case $word in
        beat) : >"$home/beat" ;;
        remove) discard ;;
        esac
    done <&3
    [ ! -d "$home" ] || : >"$home/launcher-gone"
}

discard() {
    patiently docker rm --force --volumes "$name" >/dev/null
    rm -rf "$home"
}

# patiently WORD...: again for a minute where the engine does not answer, as while it is restarted.
patiently() {
    attempt=0
    until answer=$("$@" 2>&1); do
        case $answer in *[Nn]'o such container'*) break ;; esac
        attempt=$((attempt + 1))
        [ $attempt -le 60 ] || break
        sleep 1
    done
    printf '%s\n.' "$answer"
}

# The container's exit code as $code; `gone` where it is not there, `lost` without an engine. Nothing
# is written down here or below: the disk may be what the run has filled.
await() {
    tries=0
    while code=; do
        code=$(docker wait "$name" 2>&1)
        case $code in
        *[!0-9]* | '') ;;
        *) break ;;
        esac
        case $code in *[Nn]'o such container'*) code=gone && break ;; esac
        tries=$((tries + 1))
        if [ $tries -gt 60 ]; then code=lost && break; fi
        sleep 1
    done
}

# follow OFFSET: the events from there on, until the container has ended. The lease is open in what
# waits for it too: a board is taken for as long as the container runs.
follow() {
    tail -c "+$(($1 + 1))" -F "$home/out/events.jsonl" 2>/dev/null 8<&- 9<&- 3<&- &
    tailing=$!
    await
    kill $tailing 2>/dev/null
    wait $tailing 2>/dev/null
    echo
}

sums() { cd "$home/out" && find . -type f -exec sha256sum {} +; }

# report HAVE: how it ended, the log, the events' end, every other file from the offset in HAVE on, and
# the sums of all. HAVE has lines `OFFSET PATH`.
report() {
    scratch=$(mktemp -d 2>/dev/null) && { (sums >"$scratch/sums" && : >"$scratch/whole") 2>/dev/null & }
    summing=$!
    state=none
    case $code in
    137 | gone | lost) state=$(docker inspect --format '{{.State.Status}} {{.State.OOMKilled}}' "$name" 2>/dev/null) ;;
    esac
    oom=false
    case $state in *' true') oom=true ;; esac
    log=$(patiently docker logs --tail 200 "$name")
    size=$(stat -c %s "$home/out/events.jsonl" 2>/dev/null || echo 0)
    from=0
    [ "$size" -le 65536 ] || from=$((size - 65536))
    say "ended $code $oom ${state:-none}"
    log=${log%.}
    say "log ${#log}" && printf '%s' "$log"
    if [ "$size" -gt 0 ]; then
        say "part $((size - from)) $from events.jsonl"
        tail -c "+$((from + 1))" "$home/out/events.jsonl" | head -c $((size - from))
    fi
    (cd "$home/out" && find . -type f ! -path ./events.jsonl -printf '%s %P\n') | parts "$1"
    [ -z "$scratch" ] || wait $summing
    if [ -e "$scratch/whole" ]; then bytes sums "$scratch/sums"; else
        found=$(sums && echo .)
        found=${found%.}
        say "sums ${#found}" && printf '%s' "$found"
    fi
    [ -z "$scratch" ] || rm -rf "$scratch"
}

# parts HAVE: each file of the list on standard input, from its offset in HAVE on.
parts() {
    while read -r size path; do
        from=0
        [ -z "$1" ] || from=$(printf '%s\n' "$1" | awk -v path="$path" \
            '{ at = $1; sub(/^[0-9]+ /, "") } $0 == path { print at; exit }')
        [ "${from:=0}" -le "$size" ] || from=0
        say "part $((size - from)) $from $path"
        if [ "$from" = 0 ]; then cat "$home/out/$path"; else
            tail -c "+$((from + 1))" "$home/out/$path"
        fi
    done
}

# Ends a command that watched a run: the name in the lease goes, and with it the lease.
release() {
    if [ -n "${lock:-}" ]; then : | overwrite "$lock"; fi
    exec 8<&- 9<&-
    say bye
    wait $listening
}

# run HOME NAME DEVICE LEASES HOLDER IMAGE CACHE BYTES SHA256 -- the words of `docker run`
run() {
    home=$1 name=$2 device=$3 leases=$4 holder=$5 image=$6 cache=$7 size=$8 sum=$9
    shift 10
    take "$device"
    left=$(cat "$lock")
    if [ -n "$left" ]; then
        say "left $left"
        nothing_else_runs "$device"
    fi
    said=$(mkdir -p "$home/out" 2>&1) || { room "$said"; fail folder "$said"; }
    : >"$home/beat"
    printf '%s' "$holder" | overwrite "$lock"
    docker volume inspect "$cache" >/dev/null 2>&1 && say 'cache warm' || say 'cache cold' &
    asking=$!
    said=$(head -c "$size" <&3 2>&1 >"$home/input.tar") || { abandon; room "$said"; fail folder "$said"; }
    case $(sha256sum "$home/input.tar") in
    "$sum "*) ;;
    *) abandon; room 'No space left on device'; fail input 'the inputs arrived changed' ;;
    esac
    said=$(tar -x -f "$home/input.tar" -C "$home" 2>&1) || { abandon; room "$said"; fail folder "$said"; }
    wait $asking
    found=$(docker image inspect --format '{{.Id}}' "$image" 2>&1)
    [ "$found" = "$image" ] || { abandon; fail image "$found"; }
    said=$(docker "$@" 2>&1 >/dev/null 8<&- 9<&- 3<&-) || {
        docker rm --force "$name" >/dev/null 2>&1
        abandon
        fail container "$said"
    }
    say started
    listen 8<&- 9<&- &
    listening=$!
    follow 0
    report ''
    release
}

# What was begun and never ran leaves nothing.
abandon() {
    : | overwrite "$lock"
    rm -rf "$home"
}

# watch HOME NAME DEVICE LEASES RUN OFFSET HAVE: a run that was started before.
watch() {
    home=$1 name=$2 leases=$4 lock=
    [ -d "$home/out" ] || { say nothing && exit 0; }
    lock_file "$3"
    # Its lease may still be held, by what was left of the connection that was cut: it is for this run.
    case $(cat "$lock") in
    *"\"run_id\": \"$5\""*) exec 8<"$lock" && flock -n 8 || lock= ;;
    *) lock= ;;
    esac
    rm -f "$home/launcher-gone"
    : >"$home/beat"
    say started
    listen 8<&- &
    listening=$!
    follow "$6"
    report "$7"
    release
}

# put PATH OFFSET BYTES SHA256: the rest of one file, from standard input; a part of it stays for the
# next time where the link is cut.
put() {
    mkdir -p "$(dirname "$1")"
    have=$(stat -c %s "$1.part" 2>/dev/null || echo 0)
    [ "$have" = "$2" ] || fail offset "$have"
    said=$(cat <&3 2>&1 >>"$1.part") || room "$said"
    have=$(stat -c %s "$1.part")
    [ "$have" = "$3" ] || fail short "$have"
    case $(sha256sum "$1.part") in
    "$4 "*) mv -f "$1.part" "$1" && say kept ;;
    *) rm -f "$1.part" && fail input "$1 arrived changed" ;;
    esac
}

# have PATH...: the size of each, and of its part.
have() {
    for path; do
        say "have $(stat -c %s "$path" 2>/dev/null || echo -) $(stat -c %s "$path.part" 2>/dev/null || echo 0)"
    done
}

# Which of our runs this engine has, ended ones too.
runs() {
    docker ps --all --filter label=io.narrowgauge.run \
        --format '@ng run {{.Label "io.narrowgauge.run"}} {{.State}}'
}

verb=$1
shift
say "clock $(date +%s.%N)"
case $verb in
facts) facts "$@" ;;
image) image "$@" ;;
run) run "$@" ;;
watch) watch "$@" ;;
put) put "$@" ;;
have) have "$@" ;;
runs) runs ;;
load) said=$(docker load <&3 2>&1) && say loaded || { room "$said"; fail load "$said"; } ;;
alive) say "alive $(docker inspect --format '{{.State.Running}}' "$1" 2>/dev/null || echo gone)" ;;
stop) docker stop --time "$2" "$1" >/dev/null 2>&1; say stopped ;;
discard) home=$1 name=$2 && discard && say discarded ;;
esac
say "done"
