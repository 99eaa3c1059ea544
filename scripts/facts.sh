# shellcheck shell=sh
# What a script writes down of its host for the lab: narrowgauge_contract.record.HostNote, as JSON.
# Sourced by board.sh; the script that sources that adds its own lines (machine_extra).

: "${root:?the checkout}" "${system?where the files of the host are}"

image_template() {
    printf '%s' '{{.Id}}|{{index .Config.Labels "org.opencontainers.image.base.name"}}|' \
        '{{index .Config.Labels "org.opencontainers.image.base.digest"}}|' \
        '{{index .Config.Labels "io.narrowgauge.standin"}}|' \
        '{{index .Config.Labels "io.narrowgauge.content"}}'
}

# json TEXT: a JSON text, of what ASCII holds of it.
json() {
    printf '"%s"' "$(printf '%s' "$1" | tr '\n\t' '  ' | LC_ALL=C tr -cd '\40-\176' | sed 's/\\/\\\\/g; s/"/\\"/g')"
}

# fact NAME TEXT, number NAME VALUE: a line of an object, with a comma at its end.
fact() { printf '    "%s": %s,\n' "$1" "$(json "$2")"; }
fact_or_null() { if [ -n "$2" ]; then fact "$1" "$2"; else printf '    "%s": null,\n' "$1"; fi; }
number() { printf '    "%s": %s,\n' "$1" "${2:-0}"; }

# What the record keeps of this host: narrowgauge_contract.record.HostNote. IMAGE is image_template's.
host_facts() {
    printf '{\n  "format": 1,\n  "executor": "script",\n  "machine": {\n'
    fact kernel "$(uname -r)"
    fact machine "$(uname -m)"
    fact system "$(sed -n 's/^PRETTY_NAME="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$system/etc/os-release" 2>/dev/null)"
    fact cpu "$(cpu_model)"
    number cpu_count "$(grep -c '^processor' "$system/proc/cpuinfo" 2>/dev/null || true)"
    number memory_bytes "$(awk '/^MemTotal:/ { printf "%.0f", $2 * 1024 }' "$system/proc/meminfo" 2>/dev/null)"
    fact docker "$engine_version"
    machine_extra
    printf '    "clocks": {%s},\n    "gpus": [%s]\n  },\n' "$(all_clocks)" "$(all_gpus)"
    printf '  "image": %s,\n  "git": %s,\n  "exceptions": [%s]\n}\n' \
        "$(image_facts "$1")" "$(git_facts)" "$(exceptions)"
}

# What the container has beyond the house rules, in the launcher's words.
exceptions() {
    comma=''
    if [ "$(read_only_root)" = false ]; then
        json 'writable root file system: the base needs it'
        comma=', '
    fi
    groups=$(device_groups | tr '\n' ' ' | sed 's/ *$//; s/ /, /g')
    if [ -n "$groups" ]; then printf '%s%s' "$comma" "$(json "device groups $groups")"; fi
}

cpu_model() {
    # Where there is a device tree it names the board; what ARM kernels say of the CPU names none.
    model=$(cat "$system/proc/device-tree/model" 2>/dev/null | tr -d '\000')
    if [ -z "$model" ]; then
        model=$(sed -n 's/^model name[[:space:]]*: //p' "$system/proc/cpuinfo" 2>/dev/null | sed -n 1p)
    fi
    printf '%s\n' "${model:-$(uname -m)}"
}

# The CPU's governor and bounds, and the lines NAME|VALUE that the script put into `clocks`. Names and
# units are those of src/narrowgauge/machine.py.
all_clocks() {
    comma=''
    { cpu_clocks && printf '%s\n' "$clocks"; } | while IFS='|' read -r name value; do
        if [ -z "$name" ] || [ -z "$value" ]; then continue; fi
        printf '%s%s: %s' "$comma" "$(json "$name")" "$(value "$value")"
        comma=', '
    done
}

# The kernel tells them in kHz.
cpu_clocks() {
    for name in scaling_governor scaling_min_freq scaling_max_freq; do
        value=$(cat "$system/sys/devices/system/cpu/cpu0/cpufreq/$name" 2>/dev/null) || continue
        case $value in *[!0-9]* | '') ;; *) value=${value}000 ;; esac
        printf 'cpu_%s|%s\n' "$name" "$value"
    done
}

# Lines CAPABILITY|BYTES|NAME in `gpus`; what the driver does not tell is empty.
all_gpus() {
    comma=''
    printf '%s\n' "$gpus" | while IFS='|' read -r capability bytes name; do
        if [ -z "$name" ]; then continue; fi
        printf '%s{"name": %s, "capability": %s, "memory_bytes": %s}' "$comma" "$(json "$name")" \
            "$(if [ -n "$capability" ]; then json "$capability"; else echo null; fi)" "${bytes:-null}"
        comma=', '
    done
}

# value TEXT: a number where it is one, else a text.
value() { case $1 in 0?* | *[!0-9]*) json "$1" ;; *) printf '%s' "$1" ;; esac; }

image_facts() {
    if [ -z "$1" ]; then echo null && return; fi
    digest=$(field 3 "$1")
    standin=true
    # An image that does not say what it stands on is not trusted to stand on the true base.
    if [ "$(field 4 "$1")" = false ]; then standin=false; fi
    printf '{"name": %s, "digest": %s, "base": %s, "base_digest": %s, "content_tag": %s, "stand_in": %s}' \
        "$(json "$image")" "$(json "$(field 1 "$1")")" "$(json "$(field 2 "$1")")" \
        "$(if [ -n "$digest" ]; then json "$digest"; else echo null; fi)" \
        "$(json "$(field 5 "$1")")" $standin
}

git_facts() {
    commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) || { echo null && return; }
    # As the launcher asks it, in src/narrowgauge/checkout.py.
    changed=$(git -C "$root" --no-optional-locks status --porcelain --untracked-files=no 2>/dev/null) ||
        { echo null && return; }
    if [ -n "$changed" ]; then dirty=true; else dirty=false; fi
    printf '{"commit": %s, "dirty": %s}' "$(json "$commit")" $dirty
}
