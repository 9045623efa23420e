// Nothing but the header that is compiled before it.
