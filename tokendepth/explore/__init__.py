"""A page that shows, for any text, how deep a run goes for every token: `tokendepth explore RUN`."""
