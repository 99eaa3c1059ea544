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

# Sets `driver`, `capabilities` and `cards`: a line each of CAPABILITY|DRIVER|MIB|four clocks in
# MHz|NAME. The capability is empty where the driver is too old to be asked for it. One question for
# all: each takes a second where no other program holds the driver.
query_cards() {
    if [ -f "$system/etc/nv_tegra_release" ]; then
        fail $not_applicable 'this is a Jetson' '' './scripts/jetson.sh'
    fi
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        fail $not_applicable 'there is no NVIDIA driver here' 'nvidia-smi is not on the PATH' \
            'install the driver; for the CPU: ./scripts/run.sh, or docker compose run cpu-train'
    fi
    fields=driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,name
    said=$(ask_driver "compute_cap,$fields") || true
    case $said in *'not a valid field'*) said=$(ask_driver "$fields" | sed 's/^/, /') || true ;; esac
    cards=$(printf '%s\n' "$said" | awk -F ', *' -v OFS='|' 'NF == 8 && $2 ~ /^[0-9]+\./ { $1 = $1; print }')
    if [ -z "$cards" ]; then
        fail $not_applicable 'the NVIDIA driver of this host shows no card' "$said" \
            'mend the driver (after its update: reboot); for the CPU: docker compose run cpu-train'
    fi
    driver=$(field 2 "$cards")
    capabilities=$(printf '%s\n' "$cards" | awk -F '|' '$1 ~ /^[0-9]+\.[0-9]+$/ { print $1 }')
}

ask_driver() { nvidia-smi "--query-gpu=$1" --format=csv,noheader,nounits 2>&1; }

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

# Where the driver does not tell the capabilities, it is too old for all targets but one.
choose_target() {
    query_cards
    architecture=$(machine_architecture)
    reasons='' range='' fitting=0
    while IFS='|' read -r name architectures l4t_least _ least most driver_least ways _; do
        if [ -n "$l4t_least" ] || [ "$ways" = none ]; then continue; fi
        reason=$(refusal "$architectures" "$least" "$most" "$driver_least")
        if [ -z "$reason" ]; then fitting=$((fitting + 1)); fi
        if [ -z "$reason" ] && [ -z "$target" ]; then
            target=$name accelerators=$ways range="$least to $most"
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
    if [ -z "$capabilities" ] && [ $fitting -gt 1 ]; then
        fail $not_applicable "driver $driver does not tell what its cards can do, so no target can be chosen" \
            "nvidia-smi --query-gpu=compute_cap gives no number" './scripts/run.sh, where Python 3.10 is, asks otherwise'
    fi
    say "driver $driver, compute capability $(printf '%s' "${capabilities:-unknown}" | tr '\n' ' '): target $target"
    if [ -z "$capabilities" ]; then
        say "warning: driver $driver is too old to tell the compute capability; $target is for $range"
    fi
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
            "$target takes it by $accelerators; the engine's runtimes: ${engine_runtimes% }; CDI for NVIDIA: $(if has_cdi; then echo yes; else echo no; fi)" \
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
    if [ -z "$engine_cdi" ]; then return 1; fi
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
    clocks=$(printf '%s\n' "$cards" | awk -F '|' '{ n = NR - 1
        split("sm sm_limit memory memory_limit", name, " ")
        for (i = 1; i <= 4; i++) if ($(i + 3) ~ /^[0-9]+$/) print "gpu" n "_" name[i] "_mhz|" $(i + 3) }')
    gpus=$(printf '%s\n' "$cards" | awk -F '|' -v OFS='|' '{
        print $1, ($3 ~ /^[0-9]+$/ ? sprintf("%.0f", $3 * 1048576) : ""), $8 }')
}

main "$@"
