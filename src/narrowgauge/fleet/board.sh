# What a board does for a launcher elsewhere. It is sent with each command and leaves no program there:
#   sh -c "$this" narrowgauge VERB WORD...
# Needed on the board: sh, docker, and Linux's usual coreutils, awk, sed, tar, find and flock.
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

# facts PLACE IMAGES FILE...: what the board is; what its engine says of those of the images (names or
# ids, with spaces between) that it has; and the sizes of files below PLACE/data.
facts() {
    place=$1 images=$2
    shift 2
    case $place in '~/'*) place=$HOME/${place#'~/'} ;; esac
    say "user $(id -u) $(id -g) $HOME"
    say "machine $(uname -m) $(uname -r) $(nproc)"
    described=
    for path in /etc/os-release /etc/nv_tegra_release /proc/cpuinfo /proc/meminfo \
        /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor \
        /sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq \
        /sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq; do
        [ ! -r "$path" ] || described="$described $path"
    done
    # shellcheck disable=SC2086 # a list of paths
    [ -z "$described" ] || texts $described
    for path in proc/device-tree/compatible proc/device-tree/model; do
        [ -r "/$path" ] || continue
        content=$(head -c 4096 "/$path" | tr '\000' '\n')
        say "file ${#content} $path" && printf '%s' "$content"
    done
    for path in /dev/nvmap /dev/nvhost-ctrl /dev/dri/renderD128; do
        [ -e "$path" ] && say "group $(stat -c %g "$path")"
    done
    for tool in docker flock sha256sum tar tail find stat awk sed timeout; do
        command -v "$tool" >/dev/null || say "missing $tool"
    done
    # A PC's driver; a Jetson before JetPack 6 has no such program.
    # unverified: the board's script on a real Jetson | none at hand | hosts doctor and a run on one
    nvidia-smi --query-gpu=compute_cap,driver_version,memory.total,name --format=csv,noheader,nounits \
        2>/dev/null | while IFS= read -r line; do say "gpu $line"; done
    [ ! -r /etc/nv_tegra_release ] || say "power $(nvpmodel -q 2>/dev/null | tr '\n' ' ')"
    say "free $(free_room "$(existing "$place")")"
    for file; do have "$place/data/$file"; done
    # Side by side: a line from the background is too short to mix with another.
    engine &
    say "runtimes $(docker info --format '{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' 2>/dev/null)" &
    found=
    # shellcheck disable=SC2086 # a list of names
    [ -z "$images" ] || found=$(docker image inspect --format '@ng image {{json .}}' $images 2>/dev/null)
    wait
    [ -z "$found" ] || printf '%s\n' "$found"
}

# texts FILE...: the first 4 KiB of each, all by one process: a board takes a millisecond or more to
# start one.
texts() {
    awk 'function put() {
            content = substr(content, 1, 4096)
            sub(/\n+$/, "", content)
            printf "@ng file %d %s\n%s", length(content), name, content
        }
        FNR == 1 { if (name != "") put(); name = substr(FILENAME, 2); content = "" }
        length(content) < 4096 { content = content $0 "\n" }
        END { if (name != "") put() }' "$@"
}

engine() {
    found=$(docker version --format '{{.Server.Version}} {{.Server.APIVersion}}' 2>&1) &&
        say "engine $found" || say "no-engine $(printf '%s' "$found" | tr '\n' ' ' | head -c 2000)"
}

# free_room FOLDER: bytes.
free_room() { df -Pk "$1" | awk 'NR == 2 { printf "%.0f", $4 * 1024 }'; }

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
    [ -e "$lock" ] || (umask 0 && : >>"$lock") 2>/dev/null ||
        [ -e "$lock" ] || fail lease "cannot make $lock"
}

# Who holds the device of $lock, and the seconds since its launcher was last heard; - for unknown.
held() {
    holder=$(cat "$lock")
    beat=$(printf '%s' "$holder" | sed -n 's/.*"beat": "\([^"]*\)".*/\1/p')
    age=-
    if [ -n "$beat" ] && heard=$(stat -c %Y "$beat" 2>/dev/null); then
        age=$(($(date +%s) - heard))
        # What a cut connection left says nothing against one that beats.
        gone=${beat%/*}/launcher-gone
        [ ! -e "$gone" ] || [ "$beat" -nt "$gone" ] || age=gone
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

# Listening beside what follows, without the lease: with `listen 8<&-` a shell would keep a copy. Who
# ends this command ends that one too, which else would hold its connection open.
attend() {
    (exec 8<&- 9<&- && listen) &
    listening=$!
    { echo "$listening $(born $listening)" >>"$home/pid"; } 2>/dev/null
}

discard() {
    patiently docker rm --force --volumes "$name" >/dev/null
    rm -rf "$home"
}

# patiently WORD...: again for a minute where the engine does not answer, as while it is restarted.
patiently() {
    attempt=0
    until answer=$("$@" 2>&1); do
        case $answer in *[Nn]'o such '*) break ;; esac
        attempt=$((attempt + 1))
        [ $attempt -le 60 ] || break
        sleep 1
    done
    printf '%s\n.' "$answer"
} 8<&- 9<&-

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
        sleep 1 8<&- 9<&-
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

# What can be brought from here: files that can be read, whose name is one line.
newline='
'
ours() { find . -type f -readable ! -path "*$newline*" "$@"; }
sums() { cd "$home/out" && ours -exec sha256sum {} +; }

# One name a line, of what is not brought.
left_out() {
    cd "$home/out" 2>/dev/null && find . ! -path . \
        \( ! -type d ! -type f -o ! -readable -o -path "*$newline*" \) -printf '%P\0' 2>/dev/null |
        tr '\n\000' '?\n'
}

# ran_out BEGIN END: whether memory ended a container that was killed. On a busy board the kernel's
# word may reach the engine after the exit; the state's flag then stays false for ever (Docker 20.10).
# Waits for it, unless somebody sent the signal.
ran_out() {
    [ -z "$(happened kill "$1" "$2")" ] && [ -n "$(happened oom "$1" "$(($(date -d "$2" +%s) + 3))")" ]
}

# happened EVENT SINCE UNTIL
happened() {
    docker events --since "$2" --until "$3" --filter "container=$name" --filter "event=$1" \
        --format '{{.Action}}' 2>/dev/null
}

# report HAVE [EVENTS]: how it ended, the log, the events' end, every other file from the offset in
# HAVE on, and the sums of all. HAVE has lines `OFFSET PATH`; EVENTS bytes of the events have arrived.
# What may wait for a launcher to read holds no lease.
report() {
    scratch=$(mktemp -d 2>/dev/null) && { (sums >"$scratch/sums" && : >"$scratch/whole") 2>/dev/null 8<&- 9<&- & }
    summing=$!
    state=none
    case $code in
    137 | gone | lost)
        state=$(docker inspect --format '{{.State.Status}} {{.State.OOMKilled}} {{.State.StartedAt}} {{.State.FinishedAt}}' "$name" 2>/dev/null)
        ;;
    esac
    oom=false
    # shellcheck disable=SC2086 # fields
    case "$code $state" in
    *' true '*) oom=true ;;
    137*' false '*) ! ran_out ${state#* false } || oom=true ;;
    esac
    log=$(patiently docker logs --tail 200 "$name")
    size=$(stat -c %s "$home/out/events.jsonl" 2>/dev/null || echo 0)
    from=0
    [ "$size" -le 65536 ] || from=$((size - 65536))
    [ -z "${2:-}" ] || [ "$2" -ge "$from" ] || from=$2
    say "ended $code $oom ${state:-none}"
    log=${log%.}
    say "log ${#log}" && printf '%s' "$log"
    if [ "$size" -gt 0 ]; then
        say "part $((size - from)) $from events.jsonl"
        { tail -c "+$((from + 1))" "$home/out/events.jsonl" | head -c $((size - from)); } 8<&- 9<&-
    fi
    (cd "$home/out" && ours ! -path ./events.jsonl -printf '%s %P\n' | parts "$1") 8<&- 9<&-
    [ -z "$scratch" ] || wait $summing
    if [ -e "$scratch/whole" ]; then bytes sums "$scratch/sums"; else
        found=$(sums && echo .)
        found=${found%.}
        say "sums ${#found}" && printf '%s' "$found"
    fi
    found=$(left_out)
    [ -z "$found" ] || { say "left-out ${#found}" && printf '%s' "$found"; }
    [ -z "$scratch" ] || rm -rf "$scratch"
}

# parts HAVE: each file of the list on standard input, from its offset in HAVE on.
parts() {
    { printf '%s\n' "$1" | sed 's/^/h /' && sed 's/^/f /'; } | awk '
        { kind = $1; number = $2; sub(/^[hf] [0-9]* /, "") }
        kind == "h" { at[$0] = number; next }
        { print number, (($0 in at) && at[$0] + 0 <= number + 0 ? at[$0] : 0), $0 }' |
        while IFS= read -r line; do
            size=${line%% *} line=${line#* }
            from=${line%% *} path=${line#* }
            say "part $((size - from)) $from $path"
            if [ "$from" = 0 ]; then cat "./$path"; else tail -c "+$((from + 1))" "./$path"; fi
        done
}

# Ends a command that watched a run: the name in the lease goes, and with it the lease. Without an
# engine the run may go on, and the name stays for whoever comes next.
release() {
    if [ -n "${lock:-}" ] && [ "$code" != lost ]; then : | overwrite "$lock"; fi
    exec 8<&- 9<&-
    say bye
    wait $listening
}

# run HOME NAME DEVICE LEASES HOLDER IMAGE CACHE BYTES SHA256 -- the words of `docker run`
run() {
    home=$1 name=$2 device=$3 leases=$4 holder=$5 image=$6 cache=$7 size=$8 sum=$9
    shift 10
    # There before any question, which may take long: to whoever asks, this run is about to start.
    said=$({ mkdir -p "$home" && mkdir "$home/out"; } 2>&1) || {
        [ ! -d "$home/out" ] || { again && return; }
        room "$said"
        fail folder "$said"
    }
    trap 'rm -rf "$home/out" "$home/beginning"; rmdir "$home" 2>/dev/null' EXIT
    said=$({ echo "$$ $(born $$)" >"$home/beginning"; } 2>&1) || {
        room "$said"
        fail folder "$said"
    }
    take "$device"
    left=$(cat "$lock")
    [ -z "$left" ] || say "left $left"
    # A name in any lease here: of a run that goes on, or that did not end in order.
    [ -z "$(cat "$leases"/narrowgauge*.lock 2>/dev/null)" ] || nothing_else_runs "$device"
    trap - EXIT
    : >"$home/beat"
    printf '%s' "$holder" | overwrite "$lock"
    docker volume inspect "$cache" >/dev/null 2>&1 && say 'cache warm' || say 'cache cold' &
    asking=$!
    docker image inspect --format '{{.Id}}' "$image" >"$home/image" 2>&1 &
    looking=$!
    # A connection that fell silent must not keep the board: at 50 kB/s it would be done by then.
    said=$(timeout $((60 + size / 50000)) head -c "$size" <&3 2>&1 >"$home/input.tar") || {
        came=$? && abandon
        room "$said"
        [ $came != 124 ] || fail input 'the inputs came too slowly'
        fail folder "$said"
    }
    came=$(stat -c %s "$home/input.tar")
    if [ "$came" != "$size" ]; then
        free=$(free_room "$home")
        abandon
        [ "$free" -ge $((size - came)) ] || fail disk-full "$came of $size bytes of the inputs fit"
        fail input "$came of $size bytes of the inputs arrived"
    fi
    case $(sha256sum "$home/input.tar") in
    "$sum "*) ;;
    *) abandon; fail input 'the inputs arrived changed' ;;
    esac
    said=$(tar -x -f "$home/input.tar" -C "$home" 2>&1) || { abandon; room "$said"; fail folder "$said"; }
    wait $asking $looking
    read -r found <"$home/image"
    [ "$found" = "$image" ] || { found=$(cat "$home/image") && abandon; fail image "$found"; }
    said=$(docker "$@" 2>&1 >/dev/null 8<&- 9<&- 3<&-) || {
        patiently docker rm --force "$name" >/dev/null
        abandon
        fail container "$said"
    }
    # A new name needs no room on a disk that the run may have filled by now.
    mv "$home/beginning" "$home/pid"
    say started
    attend
    follow 0
    report ''
    release
}

# Said again, since its connection was cut: the first may go on, and is watched in place of a second.
again() {
    timeout $((60 + size / 50000)) head -c "$size" <&3 >/dev/null
    watch "$home" "$name" "$device" "$leases" "${home##*/}" 0 0
}

# born PID: when it was started, as the kernel counts: with its number the name of one process.
born() {
    { IFS= read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
    # shellcheck disable=SC2086 # fields
    set -- ${stat##*) }
    printf '%s' "${20}"
}

# What was begun and never ran leaves nothing.
abandon() {
    : | overwrite "$lock"
    rm -rf "$home"
}

# lives PID BORN: whether that process is there, and not another of its number by now.
lives() { [ -n "$2" ] && [ "$(born "$1")" = "$2" ]; }

# Until the run that may be about to start has, or never will: its connection was cut as it began.
begun() {
    missed=0
    until [ -e "$home/pid" ]; do
        [ -d "$home/out" ] || { say nothing && exit 0; }
        { read -r pid when <"$home/beginning"; } 2>/dev/null || pid='' when=''
        if lives "$pid" "$when"; then missed=0; else missed=$((missed + 1)); fi
        if [ $missed -gt 2 ]; then
            case $(patiently docker inspect --format '{{.State.Status}}' "$name") in
            running* | paused* | exited* | dead*) return ;;
            esac
            discard
            say nothing
            exit 0
        fi
        sleep 0.2
    done
}

# own RUN [WORDS]: hold $lock, taken by these words, if it names this run and nobody holds it.
own() {
    exec 8<"$lock"
    ${2:-flock -n} 8 && case $(cat "$lock") in *"\"run_id\": \"$1\""*) return ;; esac
    exec 8<&-
    return 1
}

# watch HOME NAME DEVICE LEASES RUN OFFSET BYTES: a run that was started before. What has arrived of
# its files comes on standard input, BYTES of it: a list may be longer than a command line can be.
watch() {
    home=$1 name=$2 leases=$4
    have=$(head -c "$7" <&3)
    [ -d "$home/out" ] || { say nothing && exit 0; }
    begun
    lock_file "$3"
    lease=$lock
    own "$5" || lock=
    earlier=$(cat "$home/pid")
    { echo "$$ $(born $$)" >>"$home/pid"; } 2>/dev/null
    rm -f "$home/launcher-gone"
    : >"$home/beat"
    say started
    attend
    follow "$6"
    # What was left of the connection that was cut may hold the lease while it waits to be read.
    if [ -z "$lock" ]; then
        while read -r pid when; do
            if lives "$pid" "$when"; then kill "$pid" 2>/dev/null; fi
        done <<EOF
$earlier
EOF
        # What that one was waiting for may hold it for another moment.
        lock=$lease
        own "$5" 'timeout 2 flock' || lock=
    fi
    report "$have" "$6"
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

# What docker refused: fails, unless that is because the container is gone.
unless_gone() {
    case $said in *[Nn]'o such '*) said=gone ;; *) fail engine "$said" ;; esac
}

# Which of our runs this engine has, ended ones too.
runs() {
    docker ps --all --filter label=io.narrowgauge.run \
        --format '@ng run {{.Label "io.narrowgauge.run"}} {{.State}}'
}

verb=$1
shift
[ "$(uname -s)" = Linux ] || fail system "it is $(uname -s), and boards must be Linux"
say "clock $(date +%s.%N)"
if [ "$verb" = facts ]; then
    facts "$@"
    say ready
    # One command more may follow on this connection: a line with its length, and its words.
    if read -r length <&3; then
        eval "set -- $(head -c "$length" <&3)"
        verb=$1
        shift
        say "clock $(date +%s.%N)"
    fi
fi
case $verb in
facts) ;;
image) image "$@" ;;
run) run "$@" ;;
watch) watch "$@" ;;
put) put "$@" ;;
have) have "$@" ;;
runs) runs ;;
load) said=$(docker load <&3 2>&1) && say loaded || { room "$said"; fail load "$said"; } ;;
alive) said=$(docker inspect --format '{{.State.Running}}' "$1" 2>&1) || unless_gone && say "alive $said" ;;
stop) said=$(docker stop --time "$2" "$1" 2>&1) || unless_gone && say stopped ;;
discard) home=$1 name=$2 && discard && say discarded ;;
esac
say "done"
