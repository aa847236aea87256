"""The page of `tokendepth explore RUN`: the depth of every token of any text."""
