# Install the system's Chromium for the browser tests, where we may. Never fails: the tests say what they did not run.
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 && exit 0
fi
echo "Chromium is not installed and could not be: the browser tests will say that they did not run"
