"""Errors that users can mend; each is one sentence, which the command line prints as it is."""


class HceError(Exception):
    """The base of every error whose message is meant for the user: what, where, what to do."""


class InputError(HceError):
    """A file, a value or an option is not what it has to be."""


class WriterBusyError(InputError):
    """Someone else is writing just now; the same call may succeed a little later."""


class MissingPackageError(HceError):
    """An optional package is needed; the message holds the command that installs it."""


class FormatError(HceError):
    """Something on disk was not written by this version, or is damaged or incomplete."""
