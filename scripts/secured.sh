#!/usr/bin/env bash
# Starts a server with TLS by a private authority, a Unix socket, and the smallest user of SECURITY.md as the only one. Ctrl-C ends it.
here=$(cd "$(dirname "$0")" && pwd)
. "$here/servers.sh"
command -v openssl >/dev/null || { echo "openssl is missing: apt-get install -y openssl" >&2; exit 1; }
port=${PORT:-7600}
cd "$folder"
{
  openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=an authority to try" -keyout authority.key -out authority.pem
  openssl req -newkey rsa:2048 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr
  openssl x509 -req -in server.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 \
    -extfile <(echo "subjectAltName=DNS:localhost,IP:127.0.0.1") -out server.pem
} 2>openssl.log || { cat openssl.log >&2; exit 1; }
# SECURITY.md's rule, joined to one line.
acl=$(sed -n '/^ACL SETUSER guard/,/^```/p' "$here/../SECURITY.md" | grep -v '^```' | tr -s '\n ' ' ')
printf 'user default off\nuser guard on >secret %s\n' "${acl#*>PASSWORD }" >users.acl
start --port 0 --tls-port "$port" --tls-auth-clients no --tls-ca-cert-file authority.pem --tls-cert-file server.pem \
  --tls-key-file server.key --unixsocket "$folder/redis.sock" --aclfile "$folder/users.acl" --dir "$folder" --save ""
all_run "$port"
cat <<TEXT
rediss://guard:secret@localhost:$port/, with a certificate by the authority $folder/authority.pem (pid ${pids[0]})

  export SSL_CERT_FILE=$folder/authority.pem
  REDIS_URL=rediss://guard:secret@localhost:$port/ cargo run --example axum_server --features tls
  REDIS_URL=rediss://guard:secret@localhost:$port/ cargo run --example doctor --features tls
  REDIS_URL="unix://$folder/redis.sock?user=guard&pass=secret" cargo run --example doctor

Ctrl-C stops everything.
TEXT
until_stopped
