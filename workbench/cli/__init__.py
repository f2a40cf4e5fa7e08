"""The command ``workbench``: one file per verb, each a thin wrapper of the facade; ``main`` picks the verb."""
