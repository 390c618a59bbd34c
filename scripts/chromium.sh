#!/bin/sh
# Install Debian's headless Chromium, in which tests open the pages of plans: where there is none yet, and apt can.
# Without one these tests are skipped, and pytest says so.
set -eu

for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "No Chromium here, and no apt-get as root to install it: tests of pages in a browser are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# Debian has a package without a window, which is a third of the size; Ubuntu has not.
for package in chromium-headless-shell chromium; do
    if timeout 300 sh -c "apt-get update -qq && apt-get install -y -qq --no-install-recommends $package" >/dev/null 2>&1; then
        exit 0
    fi
done
echo "apt-get could not install Chromium: tests of pages in a browser are skipped" >&2
