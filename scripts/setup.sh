#!/usr/bin/env bash
# Makes .venv with everything that development needs, unless it is up to date. Used by the Makefile.
# Usage: scripts/setup.sh [java] [browser] [servers] [pravega] [azure] [docs]     with "java": also require Java 17 or newer; with "browser": also get
# Chromium where apt-get may, for the tests that look at a page; with "servers": get PostgreSQL and a server of objects,
# for the tests of stores that machines share, promtool, a Kafka broker, HDFS and Kerberos, where that needs nobody's leave; with "pravega": get
# a Pravega server for its tests, and with "azure" Azurite, which run with the deep ones; with "docs": also install what builds the documentation
# Environment: PYTHON: a Python to use, or a version such as 3.13, which must then be there; VENV: another place than .venv
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
stamp=$venv/.installed

fail() {
    echo "Error: $1" >&2
    exit 1
}

# Prints the Python of a version: on the PATH, or among those of pyenv or uv.
find_version() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/"python$1" "$(uv python find "$1" 2>/dev/null)"; do
        if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "there is no Python $1 on this machine; install it, for example with 'apt-get install python$1 python$1-venv', 'uv python install $1' or 'pyenv install $1'."
}

find_python() {
    local candidate
    if [[ ${PYTHON:-} =~ ^[0-9]+\.[0-9]+$ ]]; then
        find_version "$PYTHON"
        return
    fi
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer with its venv module is needed; install it, for example with 'apt-get install python3 python3-venv', or name it with PYTHON=/path/to/python."
}

check_java() {
    local java=java told major
    if [ -n "${JAVA_HOME:-}" ]; then java=$JAVA_HOME/bin/java; fi
    local how="install Java 17 or newer, for example with 'apt-get install openjdk-17-jre-headless'"
    told=$("$java" -version 2>&1) || fail "Spark needs Java, and '$java' does not run: $how."
    major=$(sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' <<<"$told" | head -n 1)
    if [ -z "$major" ] || [ "$major" -lt 17 ]; then
        fail "Spark needs Java 17 or newer, but '$java' is version ${major:-unknown}: $how."
    fi
}

get_browser() {
    if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then return; fi
    local how="apt-get install chromium chromium-driver"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing Chromium for the tests of pages …" >&2
        if apt-get update -qq >/dev/null 2>&1 && DEBIAN_FRONTEND=noninteractive $how -y -qq >/dev/null 2>&1; then return; fi
    fi
    echo "There is no Chromium: tests that look at pages are skipped ('$how' gets it)." >&2
}

# Takes the one program out of Debian's package of Prometheus, because installing the package starts a server.
get_promtool() {
    if command -v promtool >/dev/null || [ -x .venv-servers/bin/promtool ]; then return; fi
    local there=$PWD/.venv-servers/bin found
    found=$(mktemp -d)
    echo "Getting promtool, which checks the numbers for Prometheus, into .venv-servers …" >&2
    mkdir -p "$there"
    {
        (cd "$found" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; }) &&
            dpkg-deb --fsys-tarfile "$found"/prometheus_*.deb | tar -xO ./usr/bin/promtool >"$found/promtool" &&
            chmod +x "$found/promtool" && "$found/promtool" --version && mv "$found/promtool" "$there"
    } >/dev/null 2>&1 || echo "There is no promtool: the test that needs it is skipped (on Debian it is in the package prometheus)." >&2
    rm -rf "$found"
}

# Takes the programs out of Debian's packages of Kerberos, because installing them starts a server.
get_kerberos() {
    if command -v krb5kdc >/dev/null || [ -x .venv-servers/kerberos/usr/sbin/krb5kdc ]; then return; fi
    local there=$PWD/.venv-servers/kerberos packages="krb5-kdc krb5-admin-server krb5-user" found one
    found=$(mktemp -d)
    echo "Getting a KDC, for the test of HDFS with Kerberos, into .venv-servers …" >&2
    mkdir -p "$PWD/.venv-servers"
    (
        cd "$found"
        # shellcheck disable=SC2086
        wanted() {
            apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances $packages |
                grep -E '^(krb5-(kdc|admin-server|user)|lib(kadm5(srv|clnt)-mit12|kdb5-10|gssrpc4|verto1|verto-libev1|ev4)(t64)?)$' | sort -u
        }
        # shellcheck disable=SC2046
        { apt-get download -qq $(wanted) || { apt-get update -qq && apt-get download -qq $(wanted); }; } &&
            for one in *.deb; do dpkg-deb -x "$one" there; done &&
            test -x there/usr/sbin/krb5kdc && mv there "$there"
    ) >/dev/null 2>&1 || echo "There is no KDC: the test of HDFS with Kerberos is skipped (on Debian: $packages)." >&2
    rm -rf "$found"
}

# Has Maven copy the jars of a pom into a directory. Arguments: what they are, the pom, the directory.
get_jars() {
    local what=$1 pom=$2 there=$3
    if [ -d "$there" ]; then return; fi
    if ! command -v mvn >/dev/null; then
        echo "There is no Maven, which gets $what: tests that need one are skipped ('apt-get install maven' gets it)." >&2
        return
    fi
    echo "Getting $what for tests, into $there …" >&2
    rm -rf "$there.new"
    if mvn -q -B -f "$pom" dependency:copy-dependencies -DincludeScope=runtime \
        -DoutputDirectory="$PWD/$there.new" >/dev/null 2>&1; then
        mv "$there.new" "$there"
    else
        rm -rf "$there.new"
        echo "Maven could not get $what: tests that need one are skipped." >&2
    fi
}

get_pravega() {
    local there=.cache/pravega-0.13.0
    get_jars "a Pravega server" scripts/pravega-pom.xml $there
    rm -f $there/slf4j-reload4j-*.jar $there/log4j-1.*.jar # the server wants one library of logging
}

# Has npm get Azurite, 190 MB, for Azure's protocol.
get_azurite() {
    local version=3.37.0 there
    there=.cache/azurite-$version
    if [ -d $there ]; then return; fi
    if ! command -v npm >/dev/null; then
        echo "There is no npm, which gets Azurite: tests that need it are skipped ('apt-get install npm' gets it)." >&2
        return
    fi
    echo "Getting Azurite for tests, into $there …" >&2
    rm -rf "$there.new"
    mkdir -p "$there.new"
    if npm install --prefix "$there.new" --no-audit --no-fund "azurite@$version" >/dev/null 2>&1; then
        mv "$there.new" "$there"
    else
        rm -rf "$there.new"
        echo "npm could not get Azurite: tests that need it are skipped." >&2
    fi
}

get_servers() {
    get_promtool
    get_kerberos
    get_jars "a Kafka broker" scripts/kafka-pom.xml .cache/kafka-4.3.1
    get_jars "an HDFS cluster" scripts/hdfs-pom.xml .cache/hadoop-3.5.0
    local how="apt-get install postgresql"
    if ! command -v initdb >/dev/null && ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            echo "Installing PostgreSQL for the tests of shared stores …" >&2
            { apt-get update -qq && DEBIAN_FRONTEND=noninteractive $how --no-install-recommends -y -qq; } >/dev/null 2>&1 || true
        fi
        ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 ||
            echo "There is no PostgreSQL: tests of shared stores are skipped ('$how' gets it)." >&2
    fi
    if command -v versitygw >/dev/null || [ -x .venv-servers/bin/versitygw ] || [ -x ~/go/bin/versitygw ]; then return; fi
    if ! command -v go >/dev/null && { command -v moto_server >/dev/null || [ -x .venv-servers/bin/moto_server ]; }; then return; fi
    echo "Installing a server of objects for tests, into .venv-servers …" >&2
    # moto is a program in Python, which gives a reader a quarter of the events that this one gives it
    if command -v go >/dev/null &&
        GOBIN=$PWD/.venv-servers/bin timeout 300 go install github.com/versity/versitygw/cmd/versitygw@v1.8.0 >/dev/null 2>&1; then return; fi
    if command -v moto_server >/dev/null || [ -x .venv-servers/bin/moto_server ]; then return; fi
    # in an environment of its own: it wants older packages than the rest
    { "$(find_python)" -m venv .venv-servers &&
        .venv-servers/bin/python -m pip install --quiet --disable-pip-version-check 'moto[server]==5.2.5'; } >/dev/null 2>&1 ||
        echo "There is no server of objects: tests that need one are skipped." >&2
}

is_current() {
    [ -x $venv/bin/python ] && [ -f $stamp ] && [ $stamp -nt pyproject.toml ] && [ $stamp -nt constraints.txt ] &&
        [ "$(cat $stamp)" = "$PWD" ]
}

install() {
    local log
    log=$(mktemp)
    if ! $venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@" >"$log" 2>&1; then
        cat "$log" >&2
        fail "the packages could not be installed; pip's own words are above."
    fi
    rm -f "$log"
}

# Has two commands that are given at once make the environment one after the other.
if command -v flock >/dev/null; then
    exec 9>.setup.lock
    flock --nonblock 9 || { echo "Waiting for another command that sets up this directory …" >&2 && flock 9; }
fi
wants_docs=
for wanted in "$@"; do
    case $wanted in
        java) check_java ;;
        browser) get_browser ;;
        servers) get_servers ;;
        pravega) get_pravega ;;
        azure) get_azurite ;;
        docs) wants_docs=yes ;;
        *) fail "scripts/setup.sh knows 'java', 'browser', 'servers', 'pravega', 'azure' and 'docs', not '$wanted'" ;;
    esac
done
if ! is_current; then
    python=$(find_python)
    echo "Setting up $venv with $("$python" --version) and the packages of constraints.txt; this takes a minute or two …" >&2
    "$python" -m venv --clear $venv
    install -e '.[dev]'
    echo "$PWD" >$stamp
    echo "$venv is ready." >&2
fi
# the environment is made anew whenever it is not current, so what is there is in the pinned versions
if [ -n "$wants_docs" ] && ! [ -x $venv/bin/zensical ]; then
    echo "Installing what builds the documentation …" >&2
    install -e '.[docs]'
fi
