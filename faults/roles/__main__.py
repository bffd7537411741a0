"""Play a role, or run a command, for another build: `python -m faults.roles LOG ROLE|tidebook ARGUMENT…`."""

import sys

from faults.roles.play import play_role, run_command

if __name__ == "__main__":
    log, role, *rest = sys.argv[1:]
    if role == "tidebook":
        run_command(rest, log)
    else:
        name, folder, seed = rest
        play_role(role, name, folder, int(seed), log)
