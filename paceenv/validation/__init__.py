"""The simulator held against published and measured numbers, target file by target file."""
