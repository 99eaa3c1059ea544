# shellcheck shell=bash
# How the suite's parts run beside each other. Sourced by test.sh.

: "${logs:?the folder of the stages}" "${stages:?the table of their seconds}"

#: Runs one stage, its output in a log of its own, its seconds in the table. The log is shown when
#: the stage fails.
stage() {
    local name=$1 begin=$EPOCHREALTIME code=0
    shift
    "$@" >"$logs/$name.log" 2>&1 </dev/null || code=$?
    local seconds
    seconds=$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    printf '%s\t%s\t%s\n' "$name" "$seconds" "$code" >>"$stages"
    printf '%s' "$code" >"$logs/$name.code"
    if [ $code = 0 ]; then
        printf '%-22s %7s s\n' "$name" "$seconds"
    else
        printf '%-22s %7s s  FAILED (%s)\n' "$name" "$seconds" $code
        tail -n 150 "$logs/$name.log" | sed "s/^/$name | /"
    fi
    return $code
}

#: track 'STAGE...' WORD...: runs what has these stages. Those that it did not come to have failed:
#: who awaits one of them would wait for ever.
track() {
    local name code=0
    local -a promised
    read -ra promised <<<"$1"
    shift
    "$@" || code=1
    for name in "${promised[@]}"; do
        [ -e "$logs/$name.code" ] || printf 1 >"$logs/$name.code"
    done
    return $code
}

#: await STAGE: what a stage of another track gave, once it has ended. An empty file is one that
#: the disk had no room for.
await() {
    local code
    until [ -e "$logs/$1.code" ]; do sleep 0.2; done
    code=$(cat "$logs/$1.code")
    return "${code:-1}"
}
