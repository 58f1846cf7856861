# Sourced by quickstart and test: installs what is missing on a Debian machine, and says so. Changes nothing else.

# The oldest Rust that builds this: let chains came with it.
rust_minor_min=88

say() { printf '\n== %s\n' "$*"; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# need_packages PACKAGE...: Debian packages, installed if they are not.
need_packages() {
    local missing=() package
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ "${#missing[@]}" = 0 ] && return
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    as_root apt-get update -q >/dev/null
    as_root apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
}

has_rust() {
    local minor
    minor=$(cargo --version 2>/dev/null | sed -n 's/^cargo 1\.\([0-9]*\)\..*/\1/p')
    [ -n "$minor" ] && [ "$minor" -ge "$rust_minor_min" ]
}

# A Rust that is new enough: the one that is there, or Debian's own (rustc-web follows upstream), or rustup's.
need_rust() {
    # The verbs libraries, and what makes their bindings.
    need_packages gcc libc6-dev libibverbs-dev librdmacm-dev pkg-config clang libclang-dev
    has_rust && return
    as_root apt-get update -q >/dev/null
    if apt-cache show cargo-web >/dev/null 2>&1; then
        need_packages cargo-web rustc-web rustfmt-web rust-web-clippy
    elif apt-cache show rustup >/dev/null 2>&1; then
        need_packages rustup
        rustup toolchain install stable --profile minimal --component clippy,rustfmt
    fi
    has_rust && return
    echo "Rust 1.$rust_minor_min or newer is needed, and Debian has none here: install it with rustup" >&2
    exit 1
}

need_nextest() {
    cargo nextest --version >/dev/null 2>&1 && return
    say "installing cargo-nextest (once, some minutes)"
    cargo install --quiet --locked cargo-nextest
    PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
}
