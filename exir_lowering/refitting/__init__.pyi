from .refit import RefittedFile as RefittedFile, refit as refit
