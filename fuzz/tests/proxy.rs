//! Targets for what guests say to the proxy.

mod support;

target!(proxy_socks, 300, fuzz::proxy::socks);
target!(proxy_http, 9000, fuzz::proxy::http);
target!(proxy_directory, 600, fuzz::proxy::directory);
