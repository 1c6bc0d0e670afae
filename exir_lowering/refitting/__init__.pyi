from .refitting import RefittedFile as RefittedFile, refit as refit
