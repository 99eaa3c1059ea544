# shellcheck shell=sh
# The image for this checkout: found by its content, loaded from a file, or built. Sourced by board.sh.

: "${root:?the checkout}" "${program:?the script that sources board.sh}"

# As in src/narrowgauge_contract/errors.py.
base_unreachable=12 build_failed=13 toolchain_missing=14 data_corrupt=21

# The name of what a build would hold now; the launcher computes the same.
content_tag() (
    cd "$root" || exit 1
    {
        for file in docker/entrypoint.sh "images/$target/Dockerfile" "images/$target/verify" \
            "docker/locks/$target.txt" "docker/locks/$target-notebook.txt"; do
            if [ -f "$file" ]; then printf '%s\n' "$file"; fi
        done
        find src/narrowgauge_contract src/narrowgauge_data src/narrowgauge_kernels \
            src/narrowgauge_lab src/narrowgauge_scores -type d \( -name '.*' -o -name __pycache__ -o -name build \) -prune \
            -o -type f ! -name '.*' ! -name '*.pyc' -print
    } | LC_ALL=C sort | tr '\n' '\0' | xargs -0 sha256sum | sha256sum | cut -c 1-16
)

# Sets `image` and `tag`: the one that was named or loaded, or the one of this checkout, built where
# it is not. Under --dry-run nothing is loaded or built.
find_image() {
    if [ -n "$load" ]; then
        load_image
        return
    fi
    if [ -n "$image" ]; then
        here "$image" ||
            fail $usage "there is no image $image" '' "./scripts/$program --build $experiment builds one"
        check_image
        return
    fi
    tag=$(content_tag)
    image=narrowgauge/$target:$tag
    if [ -z "$build" ] && here "$image"; then return; fi
    if [ -n "$dry" ]; then say "$image would be built first"; else build_image; fi
}

here() { docker image inspect "$1" >/dev/null 2>&1; }

# An image of another target or machine would fail later, and with fewer words.
check_image() {
    said=$(docker image inspect --format \
        '{{index .Config.Labels "io.narrowgauge.target"}}|{{.Architecture}}' "$image")
    made=$(field 1 "$said") machine=$(field 2 "$said")
    if [ "$made" != "$target" ] || [ "$machine" != "$(machine_architecture)" ]; then
        fail $not_applicable "$image is not for this host" \
            "it is for ${made:-no target of ours} on $machine, this host is $target on $(machine_architecture)" \
            "leave --image and --load out, and the right one is built"
    fi
}

# Checks the archive against what was written beside it, loads it, and takes the image it names.
load_image() {
    for file in "$load" "$load.json"; do
        if [ ! -f "$file" ]; then
            fail $usage "there is no $file" '' 'both files that `narrowgauge images save` wrote are needed'
        fi
    done
    wanted=$(manifest sha256)
    if [ "$(sha256sum <"$load" | cut -d ' ' -f 1)" != "$wanted" ]; then
        fail $data_corrupt "$load is not what was saved" "expected sha256 ${wanted:-(none is given in $load.json)}" \
            'copy it again, together with its .json'
    fi
    image=$(manifest image)
    tag=$(manifest content)
    if [ -n "$dry" ]; then
        say "$image would be loaded first"
        return
    fi
    say "loading $load"
    docker load --input "$load" >&2 || fail $build_failed "$load cannot be loaded" '' 'docker says why above'
    check_image
    docker tag "$image" "narrowgauge/$target:local"
}

# manifest KEY: a text of FILE.json.
manifest() { tr ',{}' '\n\n\n' <"$load.json" | sed -n "s/^ *\"$1\": *\"\\([^\"]*\\)\".*/\\1/p"; }

# What has an image's own name is taken without another look, so it gets that once it is checked.
build_image() {
    unresolved=$(of_target 11)
    unchecked=$image-unchecked
    say "building $image: the first time this takes a while, on a board up to an hour"
    if [ -n "$unresolved" ]; then say "unresolved pins: $unresolved; the records say so"; fi
    have_base "$(of_target 10)"
    if docker buildx version >/dev/null 2>&1; then
        set -- buildx build --load
    else
        require_own_buildkit
        set -- build
    fi
    if [ -n "$build" ]; then set -- "$@" --no-cache; fi
    DOCKER_BUILDKIT=1 docker "$@" --label "io.narrowgauge.content=$tag" \
        --label "org.opencontainers.image.base.digest=$base_digest" --tag "$unchecked" \
        --file "$root/images/$target/Dockerfile" "$root" >&2 ||
        fail $build_failed "the image for $target cannot be built" 'docker says why above' "$(elsewhere)"
    say 'checking the image'
    eval "set -- $(accelerator_words)"
    docker run --rm --network none --read-only --cap-drop ALL --security-opt no-new-privileges \
        --tmpfs /tmp:exec --tmpfs /cache:exec "$@" --entrypoint /opt/narrowgauge/verify "$unchecked" >&2 ||
        fail $build_failed "the check of the image for $target fails" 'it says what above' \
            "./scripts/$program --build $experiment"
    for name in "$image" "narrowgauge/$target:local"; do docker tag "$unchecked" "$name"; done
    docker rmi "$unchecked" >/dev/null
}

# have_base REFERENCE: pulls it where it is not here, and sets base_digest: the registry's, or the
# image's own where it came from none.
have_base() {
    if ! here "$1"; then
        say "pulling the base $1: several GB; $(free_disk)"
        docker pull "$1" >&2 ||
            fail $base_unreachable "the base image $1 is not here and cannot be pulled" \
                'docker says why above' "$(elsewhere)"
    fi
    base_digest=$(docker image inspect --format '{{range .RepoDigests}}{{.}} {{end}}{{.Id}}' "$1")
    base_digest=${base_digest%% *}
    base_digest=${base_digest##*@}
}

free_disk() {
    if [ -d "$engine_folder" ]; then
        echo "$(df -Pk "$engine_folder" | awk 'NR == 2 { printf "%.0f GB", $4 / 1e6 }') free in $engine_folder"
    else
        echo 'free disk unknown from here'
    fi
}

# A client before 23 builds with the engine's own BuildKit; a newer one without buildx cannot.
require_own_buildkit() {
    client=$(docker --version | sed 's/^[^0-9]*//; s/[^0-9].*//')
    if [ "${client:-0}" -ge 23 ]; then
        fail $toolchain_missing 'this docker command cannot build with BuildKit' \
            "version $client of it needs buildx" \
            'sudo apt-get install docker-buildx (or docker-buildx-plugin, of Docker itself)'
    fi
}

elsewhere() {
    printf '%s\n' "on another machine: narrowgauge images build $target && narrowgauge images save $target --out FILE" \
        "then here: ./scripts/$program --load FILE $experiment"
}
