"""Operations with a fast path, each in a file with its plain reference. They take arrays and plain settings."""
