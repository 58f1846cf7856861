# Where the lab keeps things and which kernel it boots; read by setup and run.
# shellcheck shell=bash disable=SC2034

# Resolved, because guests see the host's files under the same path and do not share its working directory.
cache=$(realpath -m "${LAB_CACHE:-${HOME:?set it, or LAB_CACHE}/.cache/spindle-lab}")
kernel=${LAB_KERNEL:-6.12}
