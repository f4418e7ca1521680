"""`make faults`: play every scenario and print what became of it."""

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from faults.scenarios import SCENARIOS, TIMEOUT, play

if __name__ == "__main__":
    table = Table(
        "scenario", "ranks", "expected", "as expected", "seen", "seconds", title=f"timeout {TIMEOUT:g} s"
    )
    failed = 0
    for scenario in SCENARIOS:
        good, seen, seconds = play(scenario)
        failed += not good
        verdict, taken = "yes" if good else "NO", f"{seconds:.1f}"
        table.add_row(scenario.name, str(scenario.world), scenario.expected, verdict, escape(seen), taken)
    Console(width=160).print(table)
    sys.exit(failed > 0)
