"""What a person sees in a terminal: lines, warnings, tables, progress. Imports no other room."""
