"""Terminal output: lines, warnings, tables, progress bars. Imports no other room."""
