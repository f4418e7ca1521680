"""`python -m leannorm`, the same as `leannorm`."""

from leannorm.cli import main

raise SystemExit(main())
