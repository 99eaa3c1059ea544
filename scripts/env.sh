# shellcheck shell=sh
# Writes what docker compose reads of this checkout. Sourced by run.sh, desktop.sh and jetson.sh.

# write_env ROOT TARGET DATA: who runs, with which data, on which image, in ROOT/.env.
# Only these four lines are ours; other lines stay. Fails where it cannot be written.
write_env() {
    env_file=$1/.env
    env_kept=''
    if [ -e "$env_file" ]; then
        # Of a file that cannot be read nothing would be kept.
        if [ ! -r "$env_file" ]; then return 1; fi
        env_kept=$(sed -E '/^NARROWGAUGE_(UID|GID|DATA|TARGET)=/d' "$env_file") || return 1
    fi
    case $3 in
    # What compose would take for a variable or a comment; a quote in a path cannot be told it.
    *[\$\#\ \\]*) env_data="'$3'" ;;
    *) env_data=$3 ;;
    esac
    env_text=$(
        if [ -n "$env_kept" ]; then printf '%s\n' "$env_kept"; fi
        printf 'NARROWGAUGE_UID=%s\nNARROWGAUGE_GID=%s\n' "$(id -u)" "$(id -g)"
        printf 'NARROWGAUGE_DATA=%s\nNARROWGAUGE_TARGET=%s\n' "$env_data" "$2"
    )
    if [ -f "$env_file" ] && [ "$(cat "$env_file")" = "$env_text" ]; then return 0; fi
    # In place: the file may be a link, and its mode is its owner's choice.
    (printf '%s\n' "$env_text" >"$env_file") 2>/dev/null
}
