#!/bin/sh
# Runs an experiment on a Jetson, in the image for this board. Needs a POSIX shell and docker.
#   ./scripts/jetson.sh resnet -p batch=32 --profile short
# Its own options come first: --build (anew), --image NAME, --load FILE (of `narrowgauge images
# save`), --data DIR, --results DIR, --dry-run (prints the docker line), --help.
# The rest goes to the lab; without an experiment it is mnist.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
program=jetson.sh
# shellcheck source=scripts/board.sh
. "$root/scripts/board.sh"

# The first line of nv_tegra_release: `# R35 (release), REVISION: 2.1, …` → 35.2.1
l4t_release() {
    sed -n '1s/^# *R\([0-9][0-9]*\).*REVISION: *\([0-9.]*\).*/\1.\2/p' \
        "$system/etc/nv_tegra_release" 2>/dev/null
}

releases() { table | awk -F '|' '$3 != "" { print $1 ": L4T " $3 " up to, not with, " $4 }'; }

choose_target() {
    l4t=$(l4t_release) || l4t='' # there is no such file
    if [ -z "$l4t" ]; then
        fail $not_applicable 'this is no Jetson that says so' \
            "$system/etc/nv_tegra_release has no L4T release" \
            'on a PC: ./scripts/desktop.sh, or ./scripts/run.sh'
    fi
    # 34 was the preview of JetPack 5.
    if version_below "$l4t" 34; then
        fail $not_applicable "L4T $l4t is JetPack 4, whose Python 3.6 is at its end" \
            'no image of Narrowgauge works on it' \
            'flash JetPack 5.1 (AGX Xavier and Xavier NX take it; TX2 and Nano do not)'
    fi
    while IFS='|' read -r name _ least below _; do
        if [ -n "$least" ] && ! version_below "$l4t" "$least" && version_below "$l4t" "$below"; then
            target=$name
        fi
    done <<EOF
$(table)
EOF
    if [ -z "$target" ]; then
        fail $not_applicable "L4T $l4t fits no target" "$(releases)" \
            'flash JetPack 5.1 (Xavier, Orin) or JetPack 6 (Orin)'
    fi
    accelerators=nvidia-runtime
    say "Jetson with L4T $l4t: target $target"
}

# --gpus does not work here, and without its runtime a container sees no GPU and says nothing.
check_accelerator() {
    case " $engine_runtimes " in
    *' nvidia '*) ;;
    *)
        fail $container_refused 'this engine has no NVIDIA runtime' \
            'without it a container on a Jetson runs on the CPU, without a word' \
            'sudo apt-get install nvidia-container-toolkit; then in /etc/docker/daemon.json:
{
  "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}},
  "default-runtime": "nvidia"
}
and: sudo systemctl restart docker'
        ;;
    esac
    accelerator=$accelerators
    if [ "$engine_default_runtime" != nvidia ]; then
        say "warning: the default runtime is $engine_default_runtime, not nvidia; this run asks for it by"
        say '  name, other tools and builds do not. Beside "runtimes" in /etc/docker/daemon.json:'
        say '  "default-runtime": "nvidia"    and then: sudo systemctl restart docker'
    fi
}

# The groups that own the GPU's device files: users of them need no root.
device_groups() {
    for file in dev/nvmap dev/nvhost-ctrl dev/dri/renderD128; do
        if [ -e "$system/$file" ]; then
            # shellcheck disable=SC2012 # stat is not POSIX
            ls -lnd "$system/$file" | awk '$4 != 0 { print $4 }'
        fi
    done | sort -n | uniq
}

machine_extra() {
    power=$(nvpmodel -q 2>/dev/null | tr '\n' ' ' | sed 's/ *$//') || power=''
    fact l4t "$(sed -n 1p "$system/etc/nv_tegra_release")"
    fact_or_null power_mode "$power"
    clocks=$(memory_clock && gpu_clocks && jetson_clocks_say)
}

# GPU MinFreq=…, EMC MinFreq=… and cpu0: …, a line each; needs root, and tells others so.
# unverified: the lines of jetson_clocks --show | no Jetson was at hand | sudo jetson_clocks --show, then sudo ./scripts/jetson.sh mnist and look at host.machine.clocks in its record.json
jetson_clocks_say() {
    shown=$(jetson_clocks --show 2>/dev/null) || return 0
    printf '%s\n' "$shown" | awk '/^(cpu[0-9]+|GPU|EMC):? .*=/ {
        name = $1; sub(/:$/, "", name); sub(/^[^ ]* +/, ""); print name "|" $0 }'
}

# What every user may read: the GPU's clock now and its bounds, in Hz.
gpu_clocks() {
    for folder in "$system"/sys/class/devfreq/*gpu* "$system"/sys/class/devfreq/*.ga10b \
        "$system"/sys/class/devfreq/*.gv11b; do
        for name in cur_freq min_freq max_freq; do
            if [ -r "$folder/$name" ]; then printf 'gpu_%s|%s\n' "$name" "$(cat "$folder/$name")"; fi
        done
    done
}

# The memory's clock in Hz, where the kernel shows it.
memory_clock() {
    file=$system/sys/kernel/debug/bpmp/debug/clk/emc/rate
    if [ -r "$file" ]; then printf 'emc_rate|%s\n' "$(cat "$file")"; fi
}

main "$@"
