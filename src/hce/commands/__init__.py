"""The commands of `hce`: parse options, call the library, print the result."""
