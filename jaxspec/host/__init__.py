"""Operations on the machine and its processes; nothing here imports the model.

- `files`, `lock`: atomic files and locks.
- `user_cache`: the directory of the cache.
- `processes`: several processes of one command.
- `arguments`, `messages`: checks of arguments, and texts of errors.
- `extras`: optional dependencies.
- `progress`: the line on standard error that shows what takes long.
"""
