"""Output for a terminal: lines, warnings, tables, progress. Imports no other room."""
