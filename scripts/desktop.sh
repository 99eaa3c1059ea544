#!/bin/sh
# Runs an experiment on a PC or server with an NVIDIA card, in the image for it. Needs a POSIX
# shell and docker; where Python 3.10 is, ./scripts/run.sh does more.
#   ./scripts/desktop.sh resnet -p batch=32 --profile short
# Its own options come first: --build (anew), --image NAME, --load FILE (of `narrowgauge images
# save`), --data DIR, --results DIR, --dry-run (prints the docker line), --help.
# The rest goes to the lab; without an experiment it is mnist.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
program=desktop.sh
# shellcheck source=scripts/board.sh
. "$root/scripts/board.sh"

# Sets `driver` and `capabilities`, a line per card; these are empty where the driver is too old to
# be asked for them: that question came after the drivers that CUDA 11 needs.
query_cards() {
    if [ -f "$system/etc/nv_tegra_release" ]; then
        fail $not_applicable 'this is a Jetson' '' './scripts/jetson.sh'
    fi
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1) || {
        if command -v nvidia-smi >/dev/null 2>&1; then
            fail $not_applicable 'the NVIDIA driver of this host does not answer' "$driver" \
                'mend the driver (after its update: reboot); for the CPU: docker compose run cpu-train'
        fi
        fail $not_applicable 'there is no NVIDIA driver here' 'nvidia-smi is not on the PATH' \
            'install the driver; for the CPU: ./scripts/run.sh, or docker compose run cpu-train'
    }
    driver=$(printf '%s\n' "$driver" | sed -n 1p)
    capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null) ||
        capabilities=''
}

# Why a target does not fit this host; nothing where it does.
refusal() {
    if ! contains "$1" "$architecture"; then
        echo "its image is for $1, this host is $architecture"
        return
    fi
    for capability in $capabilities; do
        if version_below "$capability" "$2" || version_below "$3" "$capability"; then
            echo "its cards have compute capability $2 to $3, one here has $capability"
            return
        fi
    done
    if version_below "$driver" "$4"; then
        echo "it needs driver $4 or newer, this host has $driver"
    fi
}

choose_target() {
    query_cards
    architecture=$(machine_architecture)
    reasons=''
    while IFS='|' read -r name architectures l4t_least _ least most driver_least ways _; do
        if [ -n "$l4t_least" ] || [ "$ways" = none ]; then continue; fi
        reason=$(refusal "$architectures" "$least" "$most" "$driver_least")
        if [ -z "$reason" ] && [ -z "$target" ]; then
            target=$name accelerators=$ways
        fi
        reasons="$reasons$name: ${reason:-fits}
"
    done <<EOF
$(table)
EOF
    if [ -z "$target" ]; then
        case $reasons in
        *' needs driver '*) next='a newer driver: desktop-next takes cards from Turing to Blackwell with 580 or newer' ;;
        *) next='for the CPU: ./scripts/run.sh, or docker compose run cpu-train' ;;
        esac
        fail $not_applicable 'no target fits this host' "$reasons" "$next"
    fi
    say "driver $driver, compute capability $(printf '%s' "${capabilities:-unknown}" | tr '\n' ' '): target $target"
}

# The first of the target's ways that this engine offers.
check_accelerator() {
    accelerator=''
    for way in $(printf '%s' "$accelerators" | tr ',' ' '); do
        case $way in
        device-request) if has_toolkit; then accelerator=${accelerator:-$way}; fi ;;
        cdi) if has_cdi; then accelerator=${accelerator:-$way}; fi ;;
        esac
    done
    if [ -z "$accelerator" ]; then
        fail $container_refused 'this engine cannot give a container the GPU' \
            "its runtimes: $engine_runtimes; no CDI specification for NVIDIA" \
            'install the NVIDIA Container Toolkit, then:
sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker'
    fi
}

# --gpus needs no runtime of that name, only the hook.
has_toolkit() {
    case " $engine_runtimes " in *' nvidia '*) return 0 ;; esac
    command -v nvidia-container-runtime-hook >/dev/null 2>&1
}

has_cdi() {
    for folder in etc/cdi var/run/cdi; do
        for file in "$system/$folder"/*nvidia*; do
            if [ -e "$file" ]; then return 0; fi
        done
    done
    return 1
}

device_groups() { :; }

machine_extra() {
    fact driver "$driver"
    clocks=$(nvidia-smi --query-gpu=clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem \
        --format=csv,noheader,nounits 2>/dev/null |
        awk -F ', *' '{ n = NR - 1; print "gpu" n "_sm_mhz|" $1; print "gpu" n "_sm_limit_mhz|" $2
            print "gpu" n "_memory_mhz|" $3; print "gpu" n "_memory_limit_mhz|" $4 }') || clocks=''
    gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || gpus=''
}

main "$@"
