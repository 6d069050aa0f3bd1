{{/*
Pod template of a role. Context: root, name, role, image, resources, grace, restartPolicy, secret (name of the Secret), secretItems
(list of {key, path}), command (list), and optionally index, env (list), runs, ports (name → number), probes, preStop (seconds before
SIGTERM), checksums (annotations by which changed settings restart the pod), foreign (not an image of Ludus), volumes, mounts.
*/}}
{{- define "ludus.podTemplate" -}}
metadata:
  labels:
    {{- include "ludus.podLabels" . | nindent 4 }}
    {{- with .index }}
    ludus.dev/index: {{ . | quote }}
    {{- end }}
  {{- with merge dict (.root.Values.podAnnotations | default dict) (.checksums | default dict) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: {{ .restartPolicy }}
  terminationGracePeriodSeconds: {{ add .grace 15 (.preStop | default 0) }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with .root.Values.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .root.Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ .image }}
      {{- if and .root.Values.image.pullPolicy (not .foreign) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- end }}
      command:
        {{- toYaml .command | nindent 8 }}
      workingDir: /workspace
      env:
        - name: LUDUS_POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- with .env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        requests:
          {{- include "ludus.amounts" .resources | nindent 10 }}
        limits:
          {{- include "ludus.amounts" .resources | nindent 10 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      terminationMessagePolicy: FallbackToLogsOnError
      {{- with .ports }}
      ports:
        {{- range $name, $port := . }}
        - name: {{ $name }}
          containerPort: {{ $port }}
          protocol: TCP
        {{- end }}
      {{- end }}
      {{- with .preStop }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ . | quote }}]
      {{- end }}
      {{- with .probes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: workspace
          mountPath: /workspace
        - name: shm
          mountPath: /dev/shm
        - name: secrets
          mountPath: /etc/ludus/secrets
          readOnly: true
        {{- if .root.Values.files }}
        - name: files
          mountPath: /etc/ludus/files
          readOnly: true
        {{- end }}
        {{- if and .runs (not .root.Values.storage.url) }}
        - name: runs
          mountPath: /runs
        {{- end }}
        {{- with .root.Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with .mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: workspace
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .resources.sharedMemory }}
    - name: secrets
      secret:
        secretName: {{ .secret }}
        defaultMode: 0440
        items:
          {{- toYaml .secretItems | nindent 10 }}
    {{- if .root.Values.files }}
    - name: files
      configMap:
        name: {{ .name }}-files
        items:
          {{- range $path, $content := .root.Values.files }}
          - key: {{ include "ludus.fileKey" $path }}
            path: {{ $path }}
          {{- end }}
    {{- end }}
    {{- if and .runs (not .root.Values.storage.url) }}
    - name: runs
      {{- with .root.Values.storage }}
      {{- if .nfs.server }}
      nfs:
        server: {{ .nfs.server }}
        path: {{ .nfs.path }}
      {{- else if or .existingClaim .size }}
      persistentVolumeClaim:
        claimName: {{ .existingClaim | default (printf "%s-runs" $.name) }}
      {{- else }}
      emptyDir: {}
      {{- end }}
      {{- end }}
    {{- end }}
    {{- with .root.Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Requests and limits, which are equal: such pods are evicted last. Context: resources. */}}
{{- define "ludus.amounts" -}}
{{- if eq (floor .cpus) (float64 .cpus) }}
cpu: {{ int .cpus | quote }}
{{- else }}
cpu: {{ printf "%dm" (int (ceil (mulf .cpus 1000))) }}
{{- end }}
memory: {{ .memory }}
{{- if .gpus }}
{{ .gpuResource }}: {{ int .gpus | quote }}
{{- end }}
{{- end -}}

{{/* Command of a container as a YAML list: the first process of the pod, then `ludus`. Context: name, role, grace, words (list). */}}
{{- define "ludus.command" -}}
{{- $first := list "python" "-P" "-m" "ludus.launch.kubernetes.pod_process" "--job" .name "--role" .role "--index" "0" "--grace-s" (int .grace | toString) "--" -}}
{{- toYaml (concat $first (list "python" "-P" "-m" "ludus.cli.main") .words) -}}
{{- end -}}

{{/* Variables of a container of Ludus, as a YAML list. Context: root. */}}
{{- define "ludus.env" -}}
- name: HOME
  value: /tmp
{{- if .root.Values.storage.credentials }}
- name: LUDUS_S3_CREDENTIALS_FILE
  value: /etc/ludus/secrets/credentials
{{- end }}
{{- range $name, $value := .root.Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Files of the Secret in a pod of Ludus, as a YAML list. Context: root, keys (key → path). */}}
{{- define "ludus.secretItems" -}}
- key: token
  path: token
{{- range .root.Values.secretVariables }}
- key: {{ . }}
  path: env/{{ . }}
{{- end }}
{{- range $key, $path := .keys }}
- key: {{ $key }}
  path: {{ $path }}
{{- end }}
{{- if .root.Values.storage.credentials }}
- key: credentials
  path: credentials
{{- end }}
{{- end -}}
